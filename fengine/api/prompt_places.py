"""A prompt with all that belongs in front of it and between its tokens: a session's turns above, images."""

from fengine.api.generate_input import GenerateReqInput
from fengine.api.options import EngineContext
from fengine.api.sessions import Turn
from fengine.errors import InvalidRequestError
from fengine.multimodal.images import Prompt, refuse_images


def prompt_in_place(context: EngineContext, prompt: GenerateReqInput, ids: list[int], turns: dict[str, Turn]) -> Prompt:
    """All prompt ids, with placeholders for each part of their images; of a session's turn those of its context, too.

    Modifies: `turns`, to which a session's turn goes. Errors: InvalidRequestError and kinds.
    """
    images, pictures = context.parts.images, ()
    if images is None:
        refuse_images(prompt.image_data)
    else:
        pictures = images.read(prompt.image_data)
    if prompt.session_params is not None:
        turn = _turn(context, prompt, ids, turns)
        turn.images = pictures
        ids, pictures = turn.prompt(-1 if images is None else images.placeholder)
        if not ids:
            raise InvalidRequestError("session_params['offset'] leaves nothing of the context; the prompt is empty.")
    return Prompt(ids) if images is None else images.prompt(ids, pictures)


def _turn(context: EngineContext, prompt: GenerateReqInput, ids: list[int], turns: dict[str, Turn]) -> Turn:
    """The turn that the prompt would be. Modifies: `turns`."""
    bos_id = None if context.parts.tokenizer is None else context.parts.tokenizer.bos_id
    turn = context.sessions.prepare(prompt.session_params, ids, prompt.rid[0], bos_id)
    turns[turn.rid] = turn
    return turn
