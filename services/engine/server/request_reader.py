"""Translates OpenAI request bodies; rejects unsupported fields by name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from services.engine.domain.generation import Generation
from services.engine.domain.output_format import FIELDS, limit_chars, read_output_format, schema_format
from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.domain.tool_grammar import tags_of, write_tool_grammar
from services.engine.domain.tool_request import ToolRequest, read_tools, shorten_call_ids
from services.engine.generation.request import Choice, EmbedRequest, GenerationRequest, ResumeState
from services.engine.grammar.compiler import Grammar, GrammarCompiler
from services.engine.tokenization import Tokenization
from shared.contracts.engines import CAPABILITIES, ToolFormat
from shared.contracts.inference import RESUME, InferRequest, Resume, ResumedChoice
from shared.contracts.migration import RunningChoice
from shared.contracts.openai import (
    INERT,
    NOT_HONOURED,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    EmbeddingRequest,
    not_honoured,
    prompts_of,
)
from shared.errors import Conflict, ContextLengthExceeded, InvalidRequest, NotFound, UnsupportedParameter
from shared.tool_calls.families import takes_text_arguments, tool_format_of

_SHOWN_CHARS = 40
Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest, EmbeddingRequest)
Generating = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Capacity:
    """Limits of the loaded model.

    Args:
        context: Tokens of prompt and output together.
        kv_tokens: The longest sequence whose keys and values fit.
        vocab_size: Number of token ids.
    """

    context: int
    kv_tokens: int
    vocab_size: int


class RequestReader:
    """Reads requests for one model."""

    def __init__(
        self,
        tokenization: Tokenization,
        capacity: Capacity,
        eos: frozenset[int],
        defaults: Mapping[str, Any],
        generates: bool,
        revision: str,
        can_embed: bool = True,
        tool_parser: str | None = None,
    ) -> None:
        """Create a reader.

        Args:
            tokenization: The model's tokenizer.
            capacity: Limits of a request.
            eos: Tokens that end a sequence.
            defaults: The explicit values of the model's generation_config.json.
            generates: False for a model that only embeds.
            revision: Revision of the model, which a resume state must have too.
            can_embed: False for a model in stages.
            tool_parser: Family of tool calls; None: detect it.
        """
        self._tokens = tokenization
        self._capacity = capacity
        self._eos = eos
        self._defaults = defaults
        self._generates = generates
        self._revision = revision
        self._can_embed = can_embed
        self._tool_parser = tool_parser
        self._grammars = GrammarCompiler(tokenization, capacity.vocab_size, eos)

    def prepare_grammars(self) -> None:
        """Prepare the compilation of grammars, which may take a second. Call it on a thread."""
        self._grammars.prepare()

    def read(self, request: InferRequest) -> GenerationRequest | EmbedRequest:
        """Translate a request. Raises `InvalidRequest` or a subclass."""
        if request.endpoint == "other":
            raise NotFound(f"The built-in engine does not serve {request.route}")
        if request.endpoint == "embedding":
            if not self._can_embed:
                raise InvalidRequest("This model runs in stages, which do not embed; unset the model's `stages`", param="model")
            return replace(self._embedding(request.request_id, _validate(EmbeddingRequest, request.body)), share=request.share)
        if not self._generates:
            raise InvalidRequest("This model embeds and does not generate; use /v1/embeddings", param="model")
        if request.endpoint == "chat":
            read = self._chat(request.request_id, _validate(ChatCompletionRequest, request.body), request.share.flow)
        else:
            read = self._completion(request.request_id, _validate(CompletionRequest, request.body), request.share.flow)
        read = replace(read, share=request.share)
        return read if request.resume is None else self._add_resume_state(read, request.resume)

    def _add_resume_state(self, request: GenerationRequest, resume: Resume) -> GenerationRequest:
        """Add the resume state of another engine.

        Raises `Conflict` if this engine's result would differ.
        """
        self.check_revision(resume.revision)
        if request.prompt_tokens != resume.prompt_tokens:
            raise Conflict(
                f"The prompt has {request.prompt_tokens} tokens here and had {resume.prompt_tokens} where the answer was begun",
                param=RESUME,
            )
        resumed_choices = {c.index: c for c in resume.choices}
        if unknown := resumed_choices.keys() - {c.index for c in request.choices}:
            raise Conflict(f"The request has no choice {min(unknown)}", param=RESUME)
        for resumed in resume.choices:
            self._known(list(resumed.token_ids), RESUME)
        finished_choices = {index: c for index, c in resumed_choices.items() if c.finish_reason is not None}
        choices = tuple(
            self._resume_choice(c, resumed_choices[c.index], request.shown_tokens)
            if c.index in resumed_choices and resumed_choices[c.index].token_ids
            else c
            for c in request.choices
            if c.index not in finished_choices
        )
        finished = tuple(
            RunningChoice(index=i, token_ids=c.token_ids, finish_reason=c.finish_reason) for i, c in finished_choices.items()
        )
        params = request.params if resume.seed is None else replace(request.params, seed=resume.seed)
        return replace(request, choices=choices, finished=finished, params=params, prepared=resume.prepared)

    def _resume_choice(self, choice: Choice, resumed: ResumedChoice, shown: frozenset[int]) -> Choice:
        generation = Generation(self._tokens.decode_with(shown), choice.prompt, choice.stop_conditions)
        unsent = generation.resume(resumed.token_ids, resumed.text_chars, choice.echo or "")
        return replace(choice, resume_state=ResumeState(resumed.token_ids, generation, unsent))

    def check_sequences(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raise an error for unknown token ids and sequences that are too long.

        `InvalidRequest` or `ContextLengthExceeded`.
        """
        limit = min(self._capacity.context, self._capacity.kv_tokens)
        for sequence in sequences:
            self._known(list(sequence), "sequences")
            if len(sequence) > limit:
                raise ContextLengthExceeded(f"A sequence has {len(sequence)} tokens, and {limit} fit", param="sequences")

    def check_revision(self, revision: str) -> None:
        """Raise `Conflict` unless `revision` is that of the loaded weights."""
        if revision != self._revision:
            raise Conflict(f"These are the weights of revision {self._revision}, and the tokens are of {revision}", param=RESUME)

    def _chat(self, request_id: str, body: ChatCompletionRequest, flow: str) -> GenerationRequest:
        tools = read_tools(body.tools, body.tool_choice, (body.model_extra or {}).get("parallel_tool_calls"))
        if tools is not None and tools.mode == "none":
            tools = None
        form = self._form_of_calls() if tools is not None else None
        template = self._tool_form
        is_text = template is not None and takes_text_arguments(template, self._tokens.tool_template or "")
        messages = [_message(i, m, keep_arguments=is_text) for i, m in enumerate(body.messages)]
        if template in ("mistral", "mistral_v11"):
            messages = [shorten_call_ids(message) for message in messages]
        prompt = self._tokens.chat(
            messages,
            body.tools if tools is not None else None,
            body.add_generation_prompt,
            body.chat_template_kwargs or {},
        )
        self._check_embedded(prompt, "messages")
        top = (body.top_logprobs or 0) if body.logprobs else None
        read = self._generation(request_id, body, [(prompt, None)], top, flow, tools)
        if form is None:
            return read
        return replace(read, tool_format=form, shown_tokens=frozenset(self._tokens.special_ids(tags_of(form)).values()))

    @property
    def _tool_form(self) -> ToolFormat | None:
        return tool_format_of(self._tool_parser, self._tokens.tool_template or "")

    def _form_of_calls(self) -> ToolFormat:
        """Return the form in which the model writes calls. Raises `UnsupportedParameter`."""
        if self._tokens.tool_template is None:
            raise UnsupportedParameter(
                "The chat template of this model ignores tools, so the model cannot call them. Omit tools, or use another model",
                param="tools",
            )
        form = self._tool_form
        if form is None:
            raise UnsupportedParameter(
                "The chat template of this model writes tool calls in a form that is not known. Set the model's `tool_parser`",
                param="tools",
            )
        return form

    def _completion(self, request_id: str, body: CompletionRequest, flow: str) -> GenerationRequest:
        if (body.best_of or 1) > (body.n or 1):
            raise UnsupportedParameter("best_of over n is not supported by this engine", param="best_of")
        if body.echo and body.logprobs is not None:
            raise UnsupportedParameter("Echo together with logprobs is not supported by this engine", param="logprobs")
        prompts: list[tuple[list[int], str | None]] = []
        for prompt in prompts_of(body.prompt):
            ids = self._ids(prompt, "prompt")
            shown = prompt if isinstance(prompt, str) else self._tokens.decode(ids)
            prompts.append((ids, shown if body.echo else None))
        return self._generation(request_id, body, prompts, body.logprobs, flow)

    def _generation(
        self,
        request_id: str,
        body: Generating,
        prompts: list[tuple[list[int], str | None]],
        top_logprobs: int | None,
        flow: str,
        tools: ToolRequest | None = None,
    ) -> GenerationRequest:
        choices = []
        n = body.n or 1
        for number, (ids, echo) in enumerate(prompts):
            stop_conditions = StopConditions(
                self._token_limit(body, len(ids)),
                frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self._eos),
                body.stops,
            )
            choices += [Choice(number * n + i, tuple(ids), stop_conditions, echo) for i in range(n)]
        single = tuple(prompts[0][0]) if len(prompts) == 1 else None
        return GenerationRequest(
            request_id,
            tuple(choices),
            self._params(body, top_logprobs),
            sum(len(ids) for ids, _ in prompts),
            single if body.return_token_ids else None,
            _list_ignored(body),
            grammar=self._grammar(body, tools, flow),
        )

    def _grammar(self, body: Generating, tools: ToolRequest | None, flow: str) -> Grammar | None:
        given = (body.model_extra or {}) | {name: getattr(body, name) for name in body.model_fields_set & FIELDS}
        wanted = read_output_format(given)
        if tools is not None and (tools.is_enforced or wanted is not None):
            formats = [schema_format(tool.schema, "tools") for tool in tools.tools if tools.is_constrained(tool)]
            limit_chars("".join(each.text for each in formats), "tools")
            for each in formats:
                self._grammars.compile(each, flow)  # alone: a bad schema shows at its start
            form = self._form_of_calls()
            content = wanted if tools.mode == "auto" else None
            wanted = write_tool_grammar(tools, form, self._tokens.special_ids(tags_of(form)), content)
        return self._grammars.compile(wanted, flow) if wanted is not None else None

    def _token_limit(self, body: Generating, prompt: int) -> int:
        limit = min(self._capacity.context, self._capacity.kv_tokens)
        name = "context" if limit == self._capacity.context else "share of the KV cache"
        if prompt < 1:
            raise InvalidRequest("The prompt is empty", param="prompt")
        if prompt >= limit:
            raise ContextLengthExceeded(
                f"The prompt has {prompt} tokens and this model's {name} holds {limit}, output included", param=_prompt_field(body)
            )
        requested = body.token_limit
        if requested is None:
            defaults = self._defaults.get("max_new_tokens"), body.default_tokens
            return min((limit - prompt, *(d for d in defaults if isinstance(d, int) and d > 0)))
        if prompt + requested > limit:
            raise ContextLengthExceeded(
                f"{prompt} prompt tokens and {requested} to generate are more than this model's {name} of {limit}",
                param="max_tokens",
            )
        return requested

    def _params(self, body: Generating, top_logprobs: int | None) -> SamplingParams:
        def choose_value(name: str, neutral: float) -> float:
            value = getattr(body, name)
            default = self._defaults.get(name)
            return value if value is not None else (default if isinstance(default, int | float) else neutral)

        return SamplingParams(
            temperature=choose_value("temperature", 1.0),
            top_p=choose_value("top_p", 1.0),
            top_k=max(0, int(choose_value("top_k", 0))),
            min_p=choose_value("min_p", 0.0),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=choose_value("repetition_penalty", 1.0),
            logit_bias=self._bias(body.logit_bias),
            top_logprobs=top_logprobs,
        )

    def _bias(self, bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
        try:
            pairs = tuple((int(token), value) for token, value in (bias or {}).items())
        except ValueError as e:
            raise InvalidRequest("The keys of logit_bias must be token ids", param="logit_bias") from e
        self._known([token for token, _ in pairs], "logit_bias")
        return pairs

    def _embedding(self, request_id: str, body: EmbeddingRequest) -> EmbedRequest:
        inputs = [self._ids(value, "input") for value in prompts_of(body.input)]
        if not inputs or not all(inputs):
            raise InvalidRequest("An input is empty", param="input")
        longest = max(map(len, inputs))
        if longest > self._capacity.context:
            raise ContextLengthExceeded(
                f"An input has {longest} tokens and this model's context holds {self._capacity.context}", param="input"
            )
        return EmbedRequest(request_id, tuple(map(tuple, inputs)), body.dimensions, sum(map(len, inputs)), _list_ignored(body))

    def _ids(self, prompt: str | list[int], param: str) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._tokens.encode(prompt, special_tokens=True)
            self._check_embedded(tokens, param)
            return tokens
        self._known(prompt, param)
        return prompt

    def _check_embedded(self, tokens: list[int], param: str) -> None:
        """Raise `InvalidRequest` for a token that the tokenizer has and the model has not.

        The step that computes it would fail, with the requests of others, and end an engine on a
        GPU. Tokenizers of fine-tuned models have such tokens, as a `[PAD]` that was added.
        """
        if (token := max(tokens, default=0)) >= self._capacity.vocab_size:
            text = self._tokens.token_bytes(token).decode(errors="replace")[:_SHOWN_CHARS]
            raise InvalidRequest(f"{param} has {text!r}, a token that this model has no embedding of. Remove it", param=param)

    def _known(self, tokens: list[int], param: str) -> None:
        if any(not 0 <= t < self._capacity.vocab_size for t in tokens):
            raise InvalidRequest(f"{param} has a token id outside the vocabulary of {self._capacity.vocab_size}", param=param)


def _validate(kind: type[Body], body: dict[str, Any]) -> Body:
    try:
        return kind.model_validate(body)
    except ValidationError as e:
        fault = e.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise InvalidRequest(f"{where}: {fault['msg']}" if where else fault["msg"], param=where or None) from e


def _prompt_field(body: Generating) -> str:
    return "messages" if isinstance(body, ChatCompletionRequest) else "prompt"


def _list_ignored(body: Generating | EmbeddingRequest) -> tuple[str, ...]:
    """Names of fields that have no effect here.

    Raises `UnsupportedParameter` for fields that would change the output.
    """
    if (name := not_honoured(body, CAPABILITIES["builtin"].honours)) is not None:
        raise UnsupportedParameter(f"{name} is not supported by this engine", param=name)
    return tuple(sorted((body.model_extra or {}).keys() - INERT - NOT_HONOURED.keys()))


def _message(number: int, message: ChatMessage, *, keep_arguments: bool = False) -> dict[str, Any]:
    """Convert a message for chat templates.

    Content becomes text; arguments of tool calls become objects, unless `keep_arguments` is set.
    """
    plain = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_text_part(number, part) for part in message.content)
    if plain.get("tool_calls") and not keep_arguments:
        plain["tool_calls"] = [_tool_call(number, call) for call in plain["tool_calls"]]
    return plain


def _text_part(number: int, part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise UnsupportedParameter(
            f"A content part of type {part.get('type')!r} is not supported by this engine; only text is",
            param=f"messages.{number}.content",
        )
    return text


def _tool_call(number: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as e:
        raise InvalidRequest("The arguments of a tool call are not JSON", param=f"messages.{number}.tool_calls") from e
    return {**call, "function": {**function, "arguments": arguments}}
