"""Prompts whose answers quote them (edit this text, extract from this text, code), and some whose answers do not."""

from __future__ import annotations

_REPORT = (
    "The harbour of Wexmouth was closed on Tuesday after the ferry Lady Corrigan lost power two hundred metres from "
    "the pier. Captain Elena Duarte ordered the anchors dropped at 06:40, and tugs brought the vessel in by 09:15. "
    "Nobody was hurt. The operator, Northern Crossings, said that a fuel pump had failed and that all eleven ferries "
    "of the class would be inspected before Friday. Passengers may exchange their tickets until the end of March."
)
_LETTER = (
    "Dear Mr Alvarez, thank you for your letter of 14 May about invoice 20431. We has checked our records and find "
    "that the amount of 1,280 euros was payed on 2 May from the account ending in 7719. We are sorry for the second "
    "reminder, wich was sent by mistake. Your balance are zero, and no further action is needed. If you have any more "
    "questions, please call Ms Okafor at extension 318. Yours sincerely, Harriet Blom, Accounts Department."
)
_MINUTES = (
    "Minutes of 3 June. Present: Ana Ruiz, Tom Becker, Li Wei. Tom reports that the migration of the billing database "
    "took nine hours instead of four, because the indexes were rebuilt twice. Li proposes to rehearse the next one on "
    "a copy; agreed. Ana asks for a list of customers who saw errors; Tom will send it by Thursday. The budget for "
    "the new test machines, 14,500 euros, is approved. Next meeting: 17 June at 10:00 in room 4."
)
_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def size(self):
        return len(self.items)
"""
_TOTALS = """def load_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            name, price, count = line.strip().split(",")
            orders.append({"name": name, "price": float(price), "count": int(count)})
    return orders


def total(orders):
    result = 0
    for order in orders:
        result = result + order["price"] * order["count"]
    return result
"""
_SHAPES = """function area(shape) {
  if (shape.kind === "circle") {
    return Math.PI * shape.radius * shape.radius;
  }
  if (shape.kind === "square") {
    return shape.side * shape.side;
  }
  if (shape.kind === "rectangle") {
    return shape.width * shape.height;
  }
  throw new Error("unknown shape: " + shape.kind);
}
"""

PROMPTS: dict[str, list[str]] = {
    "edit": [
        f"Correct the spelling and grammar of this letter. Repeat the whole letter.\n\n{_LETTER}",
        f"Rewrite this report with Tuesday replaced by Wednesday and everything else unchanged.\n\n{_REPORT}",
        f"Repeat these minutes, but write every name in capital letters.\n\n{_MINUTES}",
        f"Repeat this text and add a title before it.\n\n{_REPORT}",
    ],
    "extract": [
        f"List the sentences of this text that contain a number.\n\n{_REPORT}",
        f"Quote the sentence of this letter that apologises, then the one that says whom to call.\n\n{_LETTER}",
        f"List what was decided in this meeting, in the words of the minutes.\n\n{_MINUTES}",
        f"List all names and dates in this letter, each with the sentence that it is from.\n\n{_LETTER}",
    ],
    "code": [
        f"Add docstrings to this class and return the whole code.\n\n```python\n{_STACK}```",
        f"Add type hints to these functions and return the whole code.\n\n```python\n{_TOTALS}```",
        f"Add the kind triangle to this function and return the whole code.\n\n```javascript\n{_SHAPES}```",
        f"Rename the class to Pile and the method peek to top. Return the whole code.\n\n```python\n{_STACK}```",
    ],
    "open": [
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Explain why the sky is blue to a child.",
        "What are the advantages of trains over planes?",
        "Describe a market in a small town on a rainy morning.",
    ],
}
"""Prompts by task. The answers to `open` quote nothing: there drafts can only lose."""
