"""Sorts reviews with a local model: `LLM` starts both services, answers all prompts at once, and ends them."""

from roster_client import LLM, Message

REVIEWS = [
    "The battery lasts for days.",
    "It broke within a week.",
    "Good sound, comfortable, worth the money.",
    "The screen flickers and support never answered.",
]
QUESTION = Message("system", "Is the review positive or negative? Answer with one word.")


def main() -> None:
    """Prints a verdict on each review."""
    with LLM("smollm2") as llm:
        answers = llm.generate(
            [[QUESTION, Message("user", review)] for review in REVIEWS],
            regex="positive|negative",
            temperature=0,
            max_tokens=8,
            progress=True,
        )
    for review, answer in zip(REVIEWS, answers, strict=True):
        print(f"{answer.text:>8}: {review}")


if __name__ == "__main__":
    main()
