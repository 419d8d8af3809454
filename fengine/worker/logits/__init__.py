"""What happens to logits between the model and the draw, one stage a file, in the order that bits depend on. penalties
-> logit_bias -> processors -> structured -> the draw -> logprobs"""

import torch

from fengine.worker.logits.bias import LogitBias
from fengine.worker.logits.penalties import Penalties
from fengine.worker.logits.processors import Processors
from fengine.worker.logits.structured import StructuredOutput
from fengine.worker.step_input import LogitsStage


def logits_stages(rows: int, vocab: int, device: torch.device) -> tuple[LogitsStage, ...]:
    """Of an engine with so many row slots, in the order that bits depend on."""
    tables = (rows, vocab, device)
    return Penalties(*tables), LogitBias(*tables), Processors(), StructuredOutput(rows)
