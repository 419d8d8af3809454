"""Before a CUDA engine takes requests: every kernel is compiled and proved, and the memory of a step is measured."""

from functools import partial

import numpy as np
import torch

from fengine.models.kv_state import KVState
from fengine.ops.ahead import compiling
from fengine.worker.chunks import PromptRows
from fengine.worker.compiled import layer_kinds
from fengine.worker.cuda_runner import CudaRunner, blank_hidden
from fengine.worker.logits.logprobs import SLICE, score_prompts
from fengine.worker.step import ForwardFn
from fengine.worker.warm_up import warm_stages


def prepare(runner: CudaRunner, kv: KVState, eager: ForwardFn) -> int:
    """Compiles and proves every kernel of the engine, with any small KV state. Returns the bytes that the largest step
    takes for its activations. First our own kernels are compiled beside each other, through `eager`: those of
    torch.compile would run meanwhile."""
    forward, runner.forward = runner.forward, eager
    with compiling():
        _prepare(runner, kv)
    runner.forward = forward
    return _prepare(runner, kv)


def _prepare(runner: CudaRunner, kv: KVState) -> int:
    """Runs every bucket with any small KV state: compiles and proves all kernels, which takes memory of its own. One
    layer of each kind stands for all: those alike run the same kernels. Returns the bytes that the largest step takes
    for its activations."""
    whole, kinds = runner.params, layer_kinds(runner.params["layers"])
    hidden_1D = blank_hidden(whole, 1)
    runner.params = whole | {"layers": [whole["layers"][index] for index in kinds]}
    k_PSGK, v_PSGK = (tuple(pages[index] for index in kinds) for pages in kv[:2])
    runner.kv = [KVState(k_PSGK, v_PSGK, kv.feature_PSX)]
    for rows in (1, 32, 64, 128, SLICE):
        blank = PromptRows(np.zeros(rows, np.int32), np.zeros((rows, 2), np.int32), 1, [])
        score_prompts(partial(runner.unembed, whole), hidden_1D, blank)
    warm_stages(runner.unembed(whole, hidden_1D))
    buckets = runner.buckets.all()
    before = 0
    for bucket in (*buckets, buckets[0]):
        torch.cuda.synchronize(runner.device)  # the bucket before was staged in the same pinned buffer
        torch.cuda.reset_peak_memory_stats(runner.device)
        before = torch.cuda.memory_allocated(runner.device)
        runner.warm(bucket)
    torch.cuda.synchronize(runner.device)
    most = torch.cuda.max_memory_allocated(runner.device) - before
    runner.params = whole
    torch.cuda.empty_cache()
    return most
