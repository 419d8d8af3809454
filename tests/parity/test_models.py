"""Every architecture against transformers in fp32: same weights and tokens, through pages, chunks, mixed batches."""

import math
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_checkpoints
import torch
from tiny_checkpoints import LLAMA3_ROPE
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from fengine import models
from fengine.models import layers
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import BATCH, KVState, Params, Tensors
from fengine.models.rope import inverse_frequencies
from fengine.models.spec import ModelSpec
from fengine.worker.hub import BOX
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4  # on logprobs
NEW_TOKENS = 160  # beyond every window and every original context of these cases
CASES: dict[str, dict[str, Any]] = {
    "llama-mha": {"num_key_value_heads": 4},
    "llama-gqa2-odd-tied-old": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "old_config": True,
    },
    "llama-gqa4-rope3-sharded": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0},
        "shards": True,
    },
    "llama-gqa7-rope3-biases-old": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3_ROPE | {"rope_theta": 10000.0},
        "old_config": True,
    },
    "qwen2-gqa7-tied": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 112,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2-mha-odd-sharded": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "shards": True,
        "old_config": True,
    },
    "qwen3-gqa4-tied": {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3-sliding-all": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0, "head_dim": 24},
    "mistral-window-of-2": {"sliding_window": 2},
    "mistral-window": {"sliding_window": 33, "head_dim": 24},
    "mistral-no-window-yarn": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral-wide-window-linear": {
        "sliding_window": 4096,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "phi3-window": {"sliding_window": 20, "pad_token_id": 0},
    "phi3-longrope": {
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
            "long_factor": [3.0] * 6,
            "partial_rotary_factor": 0.75,
        },
    },
    "granite-scales": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2-gqa2": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "pad_token_id": 0},
    "olmo2-biases": {"attention_bias": True, "pad_token_id": 0, "num_hidden_layers": 3, "seed": 5},
    "exaone4-mixed": {"sliding_window": 12, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    "exaone4-global": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "smollm3-some-turn": {"num_hidden_layers": 5, "pad_token_id": 0},
    "smollm3-slides": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 17,
        "pad_token_id": 0,
        "attention_bias": True,
    },
    "glm4-half": {"head_dim": 24, "attention_bias": True, "pad_token_id": 0},
    "glm4-all": {
        "head_dim": 16,
        "attention_bias": False,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "gemma-tied": {"head_dim": 24, "hidden_act": "gelu", "tie_word_embeddings": True, "seed": 2},
    "gemma-biases": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False, "seed": 4},
    "gemma2-mixed": {
        "sliding_window": 11,
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 4.0,
        "tie_word_embeddings": False,
        "seed": 3,
    },
    "gemma2-biases-no-caps": {
        "head_dim": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "gemma3-mixed": {
        "sliding_window": 11,
        "head_dim": 24,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 30,
        "tie_word_embeddings": False,
    },
    "gemma3-capped": {
        "sliding_window": 30,
        "head_dim": 16,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "seed": 2,
    },
    "qwen3_moe-renormalised": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "head_dim": 24,
    },
    "qwen3_moe-some-layers-dense-slides": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "mlp_only_layers": [2],
        "decoder_sparse_step": 1,
        "use_sliding_window": True,
        "sliding_window": 40,
        "attention_bias": True,
        "shards": True,
    },
    "qwen2_moe-shared": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 3,
    },
    "mixtral-window": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33, "head_dim": 24},
    "olmoe-gqa2": {"num_experts": 8, "num_experts_per_tok": 4, "pad_token_id": 0, "norm_topk_prob": True},
    "cohere2-mixed": {
        "sliding_window": 13,
        "num_hidden_layers": 5,
        "logit_scale": 0.7,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
    "cohere2-biases": {
        "sliding_window": 40,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cohere-norms": {
        "use_qk_norm": True,
        "logit_scale": 0.7,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "head_dim": 24,
        "seed": 3,
    },
    "cohere-no-norms": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "logit_scale": 0.5},
    "olmo3-mixed": {"sliding_window": 13, "num_hidden_layers": 5, "pad_token_id": 0},
    "olmo3-two-ropes": {
        "sliding_window": 40,
        "pad_token_id": 0,
        "seed": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "granitemoe-scales": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "attention_bias": True,
    },
    "ministral-mixed": {
        "sliding_window": 19,
        "head_dim": 24,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "glm-biases": {"head_dim": 24, "pad_token_id": 0},
    "ernie4_5-biases": {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False},
    "seed_oss-biases": {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True},
    "glm4_moe-norms": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "head_dim": 24,
        "attention_bias": True,
        "n_shared_experts": 2,
        "num_hidden_layers": 3,
    },
    "starcoder2-biases": {"sliding_window": 21, "seed": 2, "tie_word_embeddings": False},
    "starcoder2-no-biases": {"use_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": False, "seed": 1},
    "hunyuan_v1_dense-gqa": {"head_dim": 24, "attention_bias": True, "pad_token_id": 0},
    "hunyuan_v1_dense-alpha": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "gpt_oss-sinks": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "gpt_oss-clamped": {
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_limit": 1.5,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "glm4_moe-not-renormalised": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    },
    "qwen3-gqa2-biases": {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 16, "attention_bias": True},
}


class Loaded(NamedTuple):
    spec: ModelSpec
    params: Params
    reference: Any  # transformers' model


def load(directory: Path, device: str = "cpu") -> Loaded:
    spec = spec_from_config(read_config(directory))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return Loaded(spec, load_params(directory, spec, device=device), reference.eval())


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family = request.param.partition("-")[0]
    return load(tiny_checkpoints.write(tmp_path_factory.mktemp(request.param), family, **CASES[request.param]))


class Row:
    """A sequence in the test's own loop: its tokens, its pages, and the logits of every position."""

    def __init__(self, prompt: list[int], new_tokens: int) -> None:
        self.tokens, self.goal = list(prompt), len(prompt) + new_tokens
        self.pages: list[int] = []
        self.logits: list[Tensor] = []

    @property
    def pending(self) -> int:
        """Tokens whose KV is not written yet. Finished: 0."""
        return len(self.tokens) - len(self.logits)


def batch_of(chunks: list[tuple[Row, int]], page_size: int, padding: int) -> Tensors:
    """One step that computes the next `count` tokens of each row, padded to odd sizes."""
    token, pos, slot, q_start, kv_len = [], [], [], [0], []
    for row, count in chunks:
        done = len(row.logits)
        for position in range(done, done + count):
            token.append(row.tokens[position])
            pos.append(position)
            slot.append(row.pages[position // page_size] * page_size + position % page_size)
        q_start.append(len(token))
        kv_len.append(done + count)
    width = max(len(row.pages) for row, _ in chunks)
    table = [row.pages + [0] * (width - len(row.pages)) for row, _ in chunks]
    if padding:  # one padding row, `padding` padding tokens
        token, pos, slot = token + [0] * padding, pos + [0] * padding, slot + [0] * padding
        q_start, kv_len, table = q_start + q_start[-1:], kv_len + [0], table + [[0] * width]
    fields = (token, pos, slot, q_start, kv_len, table, [end - 1 for end in q_start[1:]])
    return dict(zip(BATCH, (torch.tensor(field, dtype=torch.int32) for field in fields), strict=True))


def run_paged(
    params: Params, spec: ModelSpec, prompts: list[list[int]], new_tokens: int, *, page_size: int, seed: int
) -> list[Row]:
    """Greedy continuation of several rows at once: random page tables, random chunk lengths, rows that start late.

    The pages are NaN at first: whatever reads a slot that is not the row's own destroys the result.
    """
    rng = random.Random(seed)
    model = models.lookup(spec.architecture)
    rows = [Row(prompt, new_tokens) for prompt in prompts]
    free = list(range(1, 1 + sum(-(-row.goal // page_size) for row in rows)))
    rng.shuffle(free)
    norm_D = params["final_norm_D"]
    kv = init_kv(spec, len(free) + 1, page_size, norm_D.dtype, norm_D.device)
    kv = KVState(*(tuple(torch.full_like(page, torch.nan) for page in pages) for pages in kv))
    step = 0
    while any(row.pending for row in rows):
        chunks = []
        for index, row in enumerate(rows):
            if row.pending and step >= 3 * index:
                chunks.append((row, rng.randint(1, min(row.pending, 7))))
        for row, count in chunks:
            while len(row.pages) * page_size < len(row.logits) + count:
                row.pages.append(free.pop())
        batch = batch_of(chunks, page_size, padding=rng.choice((0, 0, 3)))
        batch = {name: tensor.to(norm_D.device) for name, tensor in batch.items()}
        kv, hidden_TD = model.forward(params, spec, kv, batch)
        logits_TV = model.unembed(params, spec, hidden_TD).cpu()
        for r, (row, _) in enumerate(chunks):
            row.logits.extend(logits_TV[batch["q_start_B"][r] : batch["q_start_B"][r + 1]])
            if row.pending == 0 and len(row.tokens) < row.goal:
                row.tokens.append(int(row.logits[-1].argmax()))
        step += 1
    return rows


def prompts_for(spec: ModelSpec) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, spec.vocab_size) for _ in range(length)] for length in (21, 1, 6)]


@torch.no_grad()
def logprob_error(reference: Any, row: Row) -> float:
    """The largest difference of any logprob at any position, teacher-forced on the row's tokens."""
    expected = reference(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    actual = torch.stack(row.logits).log_softmax(-1)
    return float((actual - expected).abs().max())


@torch.no_grad()
def greedy(reference: Any, tokens: list[int], new_tokens: int) -> list[int]:
    """The likeliest token behind each prefix that has all but so many of these tokens: where these are the last ones,
    they are what the reference would generate, one after the other."""
    logits = reference(torch.tensor([tokens])).logits[0]
    return logits[-new_tokens - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("page_size", [1, 16])
def test_logprobs_and_greedy_ids_equal_transformers(loaded: Loaded, page_size: int) -> None:
    new_tokens = NEW_TOKENS if page_size == 16 else 24
    prompts = prompts_for(loaded.spec)
    rows = run_paged(loaded.params, loaded.spec, prompts, new_tokens, page_size=page_size, seed=page_size)
    for row in rows:
        assert logprob_error(loaded.reference, row) < TOLERANCE
    assert rows[0].tokens[:21] == prompts[0] and len(rows[0].tokens) == 21 + new_tokens
    assert rows[0].tokens[21:] == greedy(loaded.reference, rows[0].tokens, new_tokens)
    assert len(set(rows[0].tokens[-64:])) > 4  # the text is not one repeated token


def test_bits_do_not_depend_on_the_schedule(loaded: Loaded) -> None:
    """Other chunks, pages, neighbours and padding: the same logits."""
    first, *others = (
        run_paged(loaded.params, loaded.spec, prompts_for(loaded.spec), 40, page_size=size, seed=seed)
        for size, seed in ((16, 5), (1, 6), (4, 7))
    )
    for rows in others:
        for row, want in zip(rows, first, strict=True):
            assert row.tokens == want.tokens and torch.equal(torch.stack(row.logits), torch.stack(want.logits))


def test_negative_control(loaded: Loaded) -> None:
    """A model that is wrong in any one leaf fails the comparison, so the comparison can fail."""
    for leaf in ("rope_MK", "final_norm_D", *loaded.params["layers"][1].keys() - {"kind"}):
        copies = [dict(layer) for layer in loaded.params["layers"]]
        broken = dict(loaded.params, layers=copies)
        owner = broken if leaf in broken else copies[1]
        owner[leaf] = tree_map_only(Tensor, lambda tensor: tensor.roll(1, dims=-1), owner[leaf])
        (row,) = run_paged(broken, loaded.spec, prompts_for(loaded.spec)[:1], 4, page_size=4, seed=0)
        assert logprob_error(loaded.reference, row) > 100 * TOLERANCE, leaf


def test_bf16_weights_are_kept_and_computed_in_fp32(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, "qwen2", dtype=torch.bfloat16)
    model = load(directory)  # the reference converts the same bf16 weights to fp32
    assert model.params["embed"].dtype == model.params["layers"][1]["wqkv"].dtype == torch.bfloat16
    for row in run_paged(model.params, model.spec, prompts_for(model.spec), 16, page_size=16, seed=1):
        assert logprob_error(model.reference, row) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 1.0)])
def test_cuda(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """In the dtype of the weights, all activations included: bf16 is far from fp32, but not as far as a wrong model."""
    for name in ("llama-gqa4-rope3-sharded", "qwen2-gqa7-tied", "qwen3-gqa2-biases"):
        model = load(
            tiny_checkpoints.write(tmp_path / name, name.partition("-")[0], dtype=dtype, **CASES[name]), "cuda"
        )
        found = tree_leaves(model.params["layers"][0])
        assert {leaf.dtype for leaf in found if isinstance(leaf, Tensor)} == {dtype}
        for row in run_paged(model.params, model.spec, prompts_for(model.spec), 16, page_size=16, seed=1):
            assert logprob_error(model.reference, row) < tolerance


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"rope_type": "longrope", "short_factor": [1.0 + n / 9 for n in range(8)], "long_factor": [3.0] * 8}


def test_experts_are_clamped_where_transformers_clamps_them_by_default() -> None:
    config = GptOssConfig(**tiny_checkpoints.SIZES, num_local_experts=4, num_experts_per_tok=2)
    said = config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    experts = spec_from_config({key: value for key, value in said.items() if key != "swiglu_limit"}).experts
    assert experts is not None and experts.limit == GptOssExperts(config).limit == 7.0


EDGES: list[dict[str, Any]] = [
    *(YARN | more for more in (
        {"beta_slow": 1e-9}, {"beta_fast": 1e6}, {"beta_fast": 8 / math.pi, "beta_slow": 8 / math.pi}, {"factor": None},
        {"factor": 0.5}, {"truncate": None, "original_max_position_embeddings": 48}, {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.5},
    )),
    *({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
       "original_max_position_embeddings": size} for size in (16, 64, 1024)),
    *(FACTORS | {"original_max_position_embeddings": size} for size in (32, 64, 128)),
]  # fmt: skip


@pytest.mark.parametrize("rope", EDGES, ids=str)
def test_turns_are_those_of_transformers_at_the_edges_too(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 1e4, **rope}
    config = LlamaConfig(head_dim=16, max_position_embeddings=64, rope_parameters=dict(rope))
    config.architectures = ["LlamaForCausalLM"]
    frequency, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", 64)
    found = spec_from_config(config.to_dict() | {"rope_parameters": rope}).rope
    assert inverse_frequencies(found, 16, 64).equal(frequency) and found.attention_factor == scale


def test_the_model_in_the_box() -> None:
    model = load(BOX)
    prompts = prompts_for(model.spec)
    rows = run_paged(model.params, model.spec, prompts, NEW_TOKENS, page_size=16, seed=2)
    for row in rows:
        assert logprob_error(model.reference, row) < TOLERANCE
    assert rows[0].tokens[21:] == greedy(model.reference, rows[0].tokens, NEW_TOKENS)


# -- the compiled form ------------------------------------------------------------------------------------------------

PAGES, PAGE_SIZE = 37, 4  # an unusual number of elements, so that it can be found in generated code


def compiled_code(params: Params, spec: ModelSpec, batches: list[Tensors]) -> tuple[str, list[Tensor]]:
    """The code Inductor writes for one graph that serves all batches, and the logits of each."""
    torch._dynamo.reset()
    model = models.lookup(spec.architecture)

    def run(params: Params, kv: KVState, batch: Tensors) -> tuple[KVState, Tensor]:
        tokens, rows = batch["token_T"].shape[0], batch["kv_len_R"].shape[0]
        for tensor in (batch["pos_T"], batch["slot_T"]):
            torch._check(tensor.shape[0] == tokens)
        torch._check(batch["page_table_RN"].shape[0] == rows)
        torch._check(batch["q_start_B"].shape[0] == rows + 1)
        kv, hidden_TD = model.forward(params, spec, kv, batch)
        return kv, model.unembed(params, spec, hidden_TD.index_select(0, batch["logit_index_R"]))

    compiled = torch.compile(run, fullgraph=True, options={"cpp.vec_isa_ok": True})  # as in engines

    def all_batches() -> list[Tensor]:
        kv, logits = init_kv(spec, PAGES, PAGE_SIZE, torch.float32, "cpu"), []
        for batch in batches:
            for tensor in batch.values():
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            torch._dynamo.decorators.mark_unbacked(batch["page_table_RN"], 1)
            kv, logits_RV = compiled(params, kv, batch)
            logits.append(logits_RV)
        return logits

    logits, code = run_and_get_code(all_batches)
    assert len(code) == 1, f"{len(code)} graphs: a batch size caused a compile"
    return code[0], logits


def kv_sized(code: str, spec: ModelSpec) -> list[str]:
    """Lines that allocate or loop over a whole layer's pages."""
    numel = PAGES * PAGE_SIZE * spec.num_kv_heads * spec.head_dim
    shape = f"empty_strided[a-z_]*\\(\\(({PAGES}, {PAGE_SIZE}|{PAGES * PAGE_SIZE}|{numel})\\b"
    return [line for line in code.splitlines() if re.search(rf"{shape}|<\s*static_cast<int64_t>\({numel}L", line)]


def some_batches() -> list[Tensors]:
    """A prefill of two rows, then a decode step of one more size."""
    rows = [Row([5, 6, 7, 8, 9], 0), Row([10, 11], 0)]
    rows[0].pages, rows[1].pages = [3, 36], [7]
    prefill = batch_of([(rows[0], 4), (rows[1], 2)], PAGE_SIZE, padding=0)
    rows[0].logits = [torch.zeros(1)] * 4
    return [prefill, batch_of([(rows[0], 1)], PAGE_SIZE, padding=0)]


COMPILED: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    "gemma3": {"head_dim": 24, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=COMPILED)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, ModelSpec]:
    directory = tiny_checkpoints.write(tmp_path_factory.mktemp("compiled"), request.param, **COMPILED[request.param])
    spec = spec_from_config(read_config(directory))
    return load_params(directory, spec), spec


def test_compiled_step_copies_no_pages_and_gives_the_same_bits(tiny: tuple[Params, ModelSpec]) -> None:
    params, spec = tiny
    code, compiled_logits = compiled_code(params, spec, some_batches())
    assert kv_sized(code, spec) == []
    kv, model = init_kv(spec, PAGES, PAGE_SIZE, torch.float32, "cpu"), models.lookup(spec.architecture)
    for batch, actual in zip(some_batches(), compiled_logits, strict=True):
        kv, hidden_TD = model.forward(params, spec, kv, batch)
        expected = model.unembed(params, spec, hidden_TD.index_select(0, batch["logit_index_R"]))
        assert torch.equal(actual, expected)


def test_the_search_for_page_copies_finds_them(tiny: tuple[Params, ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a KV write that is pure in the naive way, into copies."""
    params, spec = tiny
    write: Any = layers.rope.rope_kv_write

    def copying(*args: Any, **options: Any) -> Any:
        *front, k_PSGK, v_PSGK = args[:6]
        return write(*front, k_PSGK.clone(), v_PSGK.clone(), *args[6:], **options)

    monkeypatch.setattr(layers.rope, "rope_kv_write", copying)
    code, _ = compiled_code(params, spec, some_batches())
    assert kv_sized(code, spec) != []
