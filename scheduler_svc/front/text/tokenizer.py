"""A model's text: tokenizer, chat template, vocabulary and limits, built once per Hello.

Front workers encode and decode all text here. Only the chat template and the tokenizer's post-processor write special
tokens (see special_tokens). A `text` prompt gets the tokens that the post-processor adds (such as BOS). A rendered chat
gets none added, as its template writes all of them. Token ids are used unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from roster_protos import inference_pb2, plan_pb2
from scheduler_svc.front.base.refusal import invalid
from scheduler_svc.front.text.chat_template import ChatTemplateError, TemplateUnusable
from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.null_content import with_null_content
from scheduler_svc.front.text.special_tokens import SpecialTokens
from scheduler_svc.front.text.template_renderer import TemplateRenderer
from scheduler_svc.front.text.text_stream import ChoiceText, TextOptions
from scheduler_svc.front.text.token_texts import TokenTexts


class ModelText:
    """The text side of one model.

    `model`: the runner's description. Raises UnsupportedTokenizer if its tokens can't be detokenized one by one, and
    ValueError if the tokenizer is invalid. If a chat template doesn't compile, only chats are refused. Rendering a chat
    waits for another process (see template_renderer), so it must not be done on the event loop.
    """

    def __init__(self, model: plan_pb2.Model) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.eos_token_ids = tuple(model.eos_token_ids)
        self._special = SpecialTokens(model.tokenizer, model.chat_template)
        self._tokenizer = Tokenizer.from_buffer(self._special.renamed)
        # A tokenizer.json may contain truncation and padding from training, which would silently alter prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.max_token_bytes = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        """Size of the longest token, in bytes of text."""
        self._texts = {
            skip: TokenTexts(self._tokenizer, self._special.text_of, skip, self._special.mark_of)
            for skip in (True, False)
        }
        self._template: TemplateRenderer | None = None
        if model.chat_template:
            most = self.context_length * self.max_token_bytes
            self._template = TemplateRenderer(model.chat_template, model.special_tokens, most)

    def check_template(self) -> str:
        """Compiles the chat template. Returns the reason why it can't be used, "" if it can or there is none.

        Takes up to seconds.
        """
        try:
            if self._template is not None:
                self._template.check()
        except TemplateUnusable as error:
            return str(error)
        return ""

    def template_for_gateway(self) -> str:
        """Returns the chat template for a renderer elsewhere, "" if there is none: one that takes null as content.

        Takes up to seconds.
        """
        if self._template is None:
            return ""
        return with_null_content(self.model.chat_template, self._template.render)

    def close(self) -> None:
        """Ends the template's process."""
        if self._template is not None:
            self._template.close()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of plain text, with those that the post-processor adds. Special tokens in it stay text."""
        return self._tokenizer.encode(self._special.with_marks(text)).ids

    def encode_prompt(self, prompt: inference_pb2.Prompt) -> list[int]:
        """Returns the tokens of a prompt of any kind.

        Raises Refusal without a kind, without a chat template, or if the template can't render the chat. Costs about
        1 µs per byte of text; `validation` bounds the size first.
        """
        kind = prompt.WhichOneof("kind")
        if kind == "text":
            return self.encode(prompt.text)
        if kind == "token_ids":
            return list(prompt.token_ids.ids)
        if kind == "user_message" and self._template is None:
            return self.encode(prompt.user_message)
        if kind == "user_message":
            return self._encode_chat([("user", prompt.user_message)], True, "prompt.user_message")
        if kind == "chat":
            chat = prompt.chat
            messages = [(message.role, "".join(part.text for part in message.parts)) for message in chat.messages]
            adds_header = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            return self._encode_chat(messages, adds_header, "prompt.chat")
        raise invalid("prompt", "set one of `text`, `token_ids`, `chat` and `user_message`")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Ids outside the tokenizer's vocabulary add nothing."""
        detokenizer = Detokenizer(self._texts[skip_special_tokens])
        pieces = [detokenizer.push(token) for token in ids]
        return "".join(pieces) + detokenizer.finish()

    def choice(self, request: inference_pb2.GenerateRequest, received: Sequence[int] = ()) -> ChoiceText:
        """Returns the text stream of a choice. `received`: tokens that an earlier attempt delivered."""
        options = TextOptions.of(request)
        return ChoiceText(self._texts[options.skip_special_tokens], options, received)

    def _encode_chat(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool, field: str) -> list[int]:
        """Returns the tokens of messages (role, content), rendered while the users' special tokens are shielded.

        Raises Refusal, which names `field`.
        """
        if self._template is None:
            raise invalid(field, "the model has no chat template; send `text` or `token_ids` instead")
        special, template = self._special, self.model.chat_template
        shielded = [
            {"role": special.shield_role(role, template), "content": special.shield(content)}
            for role, content in messages
        ]
        try:
            text = self._template.render(shielded, add_generation_prompt)
        except TemplateUnusable as error:
            raise invalid(field, f"{error}; send `text` or `token_ids` instead") from error
        except ChatTemplateError as error:
            raise invalid(f"{field}.messages" if field == "prompt.chat" else field, str(error)) from error
        return self._tokenizer.encode(special.seal(text), add_special_tokens=False).ids
