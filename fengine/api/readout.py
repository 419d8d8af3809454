"""`Readout`: the calls of `Engine` that read a prompt without continuing it; and those that open and close sessions."""

import asyncio
import os
from typing import Any

from fengine.api.embedding import EncodeCall, pair_ids, rerank_scores
from fengine.api.generation import Generation
from fengine.api.options import bring_back
from fengine.api.results import Output
from fengine.api.scoring import ScoreResult, Scoring
from fengine.errors import EngineClosedError


class Readout(Generation):
    """SGLang's signatures. Errors everywhere: InvalidRequestError and its kinds, UnsupportedFeatureError,
    EngineClosedError, EngineDeadError."""

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def encode(
        self, prompt: Any, image_data: Any = None, audio_data: Any = None, video_data: Any = None,
        dimensions: int | None = None, lora_path: Any = None, embed_override_token_id: int | None = None,
        embed_overrides: Any = None, external_trace_header: Any = None, rid: str | list[str] | None = None,
    ) -> Output | list[Output]:  # fmt: skip
        """{"embedding": list of float, "meta_info"} of a prompt, text or token ids; a list of these for a list. A
        prompt that is aborted has the embedding None.

        Pooled and normalised as the checkpoint says, else its last token, normalised; `dimensions` keeps the first ones
        and normalises them. A classifier or reward model gives its head's outputs, one for each label.
        """
        return self.begin_encode(locals(), None).wait_sync()

    async def async_encode(
        self, prompt: Any, image_data: Any = None, audio_data: Any = None, video_data: Any = None,
        dimensions: int | None = None, lora_path: Any = None, embed_override_token_id: int | None = None,
        embed_overrides: Any = None, external_trace_header: Any = None, rid: str | list[str] | None = None,
    ) -> Output | list[Output]:  # fmt: skip
        """As `encode`. Works in any event loop."""
        arguments = locals()
        await bring_back(self._door.parts, lora_path)
        return await self.begin_encode(arguments, asyncio.get_running_loop()).wait_async()

    def rerank(self, prompt: Any) -> list[Output]:
        """[{"embedding": score, "meta_info"}] of [[query, document], …] by a …ForSequenceClassification.

        A model of several labels gives a list of scores instead of one.
        """
        outputs: Any = self.begin_encode({"prompt": pair_ids(self._door, prompt)}, None).wait_sync() if prompt else []
        return rerank_scores(outputs)

    def begin_encode(self, arguments: Any, loop: asyncio.AbstractEventLoop | None, head: bool = True) -> EncodeCall:
        """Checks the arguments of an `encode` and queues its requests, as `begin` does."""
        if os.getpid() != self._pid:
            raise EngineClosedError("this engine belongs to the parent process; create a new Engine after a fork")
        return EncodeCall(self._door, arguments, loop, head)

    # -- scores --------------------------------------------------------------------------------------------------------

    def score(
        self, query: Any = None, items: Any = None, label_token_ids: Any = None, apply_softmax: bool = False,
        item_first: bool = False, embed_override_token_id: int | None = None, query_embed_overrides: Any = None,
        item_embed_overrides: Any = None, return_pooled_hidden_states: bool = False,
        score_extraction_token_id: int | None = None, temperature: float = 1.0, return_token_logprobs: bool = False,
        stacked_query_item_embed_overrides: Any = None,
    ) -> ScoreResult:  # fmt: skip
        """For each item, each label's probability right behind query + item; a list of lists, with more attributes.

        With `apply_softmax` the labels' probabilities (at `temperature`) add up to 1. `label_token_ids` is one list for
        all items or one for each. A classifier gives its labels' logits, or their softmax; it looks at no tokens.
        Errors: AbortedError if one of its requests is aborted.
        """
        scoring = self._scoring(locals())
        if not scoring.prompts:
            return ScoreResult()
        if scoring.labels is not None:
            outputs: Any = self.generate(**scoring.generate_arguments())
            return scoring.from_logprobs(outputs)
        calls = [self.begin_encode({"prompt": scoring.prompts}, None, head) for head in scoring.heads]
        found: Any = [call.wait_sync() for call in calls]
        return scoring.from_heads(*found)

    async def async_score(
        self, query: Any = None, items: Any = None, label_token_ids: Any = None, apply_softmax: bool = False,
        item_first: bool = False, embed_override_token_id: int | None = None, query_embed_overrides: Any = None,
        item_embed_overrides: Any = None, return_pooled_hidden_states: bool = False,
        score_extraction_token_id: int | None = None, temperature: float = 1.0, return_token_logprobs: bool = False,
        stacked_query_item_embed_overrides: Any = None,
    ) -> ScoreResult:  # fmt: skip
        """As `score`. Works in any event loop."""
        scoring = self._scoring(locals())
        if not scoring.prompts:
            return ScoreResult()
        if scoring.labels is not None:
            outputs: Any = await self.async_generate(**scoring.generate_arguments())
            return scoring.from_logprobs(outputs)
        loop = asyncio.get_running_loop()
        calls = [self.begin_encode({"prompt": scoring.prompts}, loop, head) for head in scoring.heads]
        found: Any = [await call.wait_async() for call in calls]
        return scoring.from_heads(*found)

    def _scoring(self, arguments: dict[str, Any]) -> Scoring:
        spec = self._door.parts.spec
        return Scoring.of(arguments, generates=spec.num_labels is None, vocab_size=spec.vocab_size)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def open_session(
        self, capacity_of_str_len: int, session_id: str | None = None, streaming: bool = False,
        timeout: float | None = None,
    ) -> str | None:  # fmt: skip
        """A new session's id, for `session_params={"id": …}` of `generate`; None if that id is in use.

        It closes after `timeout` seconds without a request. `capacity_of_str_len` bounds nothing, as in SGLang.
        """
        return self._door.sessions.open(capacity_of_str_len, session_id, streaming, timeout)

    def close_session(self, session_id: str) -> None:
        """Forgets a session; a turn that runs goes on to its end. Errors: SessionError if there is none."""
        self._door.sessions.close(session_id)
