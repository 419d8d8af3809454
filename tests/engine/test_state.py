"""KV state as a value: a handle is used once, and snapshot, restore and fork move whole pages and nothing else."""

from dataclasses import replace

import pytest
import torch

from fengine.errors import InvalidRequestError, StaleStateError
from fengine.models.kv_pages import fork, init_kv, restore, snapshot
from fengine.models.kv_state import KVHandle, KVState
from fengine.models.spec import LayerKind, ModelSpec, RopeSpec

SPEC = ModelSpec("LlamaForCausalLM", 32, 8, 16, 2, 2, 1, 4, 1e-5, RopeSpec(1e4), 64, True)


def random_kv(pages: int = 6) -> KVState:
    kv = init_kv(SPEC, pages, 4, torch.float32, "cpu")
    for tensor in kv.k_PSGK + kv.v_PSGK:
        tensor.normal_()
    return kv


def test_a_handle_gives_its_state_away_once() -> None:
    handle = KVHandle(random_kv())
    assert handle.alive
    handle.take()
    assert not handle.alive
    with pytest.raises(StaleStateError, match="(?s)wrong:.*right:.*snapshot"):
        handle.take()


def test_snapshot_is_a_copy_and_restore_puts_it_elsewhere() -> None:
    kv = random_kv()
    saved = snapshot(kv, [2, 4])
    before = [t.clone() for t in kv.k_PSGK + kv.v_PSGK]
    for tensor in kv.k_PSGK + kv.v_PSGK:
        tensor[2:5] = 0
    kv = restore(kv, saved, [5, 1])
    for now, then in zip(kv.k_PSGK + kv.v_PSGK, before, strict=True):
        assert torch.equal(now[5], then[2]) and torch.equal(now[1], then[4])
        assert torch.equal(now[0], then[0]) and not now[2:5].any()


def test_fork_copies_pages_so_that_both_can_go_on() -> None:
    kv = random_kv()
    then = kv.v_PSGK[1].clone()
    kv = fork(kv, [1, 2], [3, 4])
    assert torch.equal(kv.v_PSGK[1][3:5], then[1:3]) and torch.equal(kv.v_PSGK[1][:3], then[:3])
    kv.v_PSGK[1][3] = 7
    assert torch.equal(kv.v_PSGK[1][1], then[1])


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    spec = replace(SPEC, kinds=(LayerKind(window=3), LayerKind()))
    kv = init_kv(spec, 6, 4, torch.float32, "cpu", window_pages=4)
    for tensor in kv.tensors:
        tensor.normal_()
    then = [t.clone() for t in kv.v_PSGK]
    assert [len(t) for t in then] == [4, 6] and kv.num_pages == 6
    kv = fork(kv, [1, 2], [4, 5], [3], [1])
    assert torch.equal(kv.v_PSGK[0][1], then[0][3]) and torch.equal(kv.v_PSGK[0][2:], then[0][2:])
    assert torch.equal(kv.v_PSGK[1][4:], then[1][1:3]) and torch.equal(kv.v_PSGK[1][:4], then[1][:4])
    with pytest.raises(InvalidRequestError, match="1 to 3"):
        snapshot(kv, [1], [4])
    with pytest.raises(InvalidRequestError, match="1 pages but 0"):
        restore(kv, snapshot(kv, [1], [2]), [3])
    with pytest.raises(InvalidRequestError, match="share one group"):
        snapshot(random_kv(), [1], [2])


@pytest.mark.parametrize("pages", [[0], [6], [-1]])
def test_pages_outside_the_state_are_refused(pages: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="null page"):
        snapshot(random_kv(), pages)


def test_a_snapshot_must_fit_its_targets() -> None:
    kv = random_kv()
    with pytest.raises(InvalidRequestError, match="2 pages but 1"):
        restore(kv, snapshot(kv, [1, 2]), [3])
