"""Language models with made-up weights in which attention decides every token: for tests and the demo.

A randomly initialised model hardly looks at its context, and where it does the two best tokens are close: rounding, or
another split of the prefill, changes the text. Here the weights are random but built around one exact mechanism, in the
ordinary Llama or Qwen3 architecture, so that text depends on far context and yet no rounding ever changes it.

A token of the vocabulary is `kv_heads` digits in base `digit_base`. The residual stream holds, in orthogonal subspaces that
a random rotation spreads over all of its dimensions: one stream a digit (one-hot), a constant, and ballast. In every layer
key-value head g of position p

    points   by rotary phase alone, to position p - offset[layer, g, digit of another stream at p]; where that is before the
             start, to p itself,
    copies   the digit it finds in stream g there, permuted, into the next stream, and
    erases   stream g at p, by a second query head that points to p itself.

So the next token is made of one far digit for each head, found through one hop a layer, and every layer and head of the
cache counts: zeroed, shifted, swapped or foreign KV gives other tokens. Attention scores differ by more than `SCORE_GAP_MIN`
between the position pointed to and any other, so softmax is one-hot to e^-20, and the best token leads the next by a whole
digit of `kv_heads`. bf16 moves either by about 1 %. MLPs, further query heads and parts of keys and values compute ballast: work
and bytes like a real model's, with no say in the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Attention score of a pointer at its target. bf16 queries and keys move it by about 1; SCORE_GAP_MIN is 1/40 of it.
SCORE_PEAK: Final = 800.0
SCORE_GAP_MIN: Final = 20.0
# Height of the pointer to the own position, which wins only where the far one is before the start.
SELF_HEIGHT: Final = 0.9
BALLAST: Final = 1.0  # norm of the ballast in the residual; a digit has 1
BALLAST_STEP: Final = 0.02  # norm a sublayer adds to it; 2 x 16 layers of it change the residual's norm by 0.1 %
# A digit is not exactly 1 high deep in the model, as norms drift and bf16 rounds: pointers are sharp at either end.
FADES: Final = (0.95, 1.02)
OFFSET_MIN: Final = 16  # the main lobe of a pointer is a few positions wide, and must not reach the own position
ROPE_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a model. The vocabulary is every combination of digits: `digit_base ** kv_heads` tokens.

    `context_tokens` bounds prompt and reply together; pointers reach `reach_tokens` back, spread evenly over magnitudes.
    """

    family: Literal["llama", "qwen3"] = "llama"
    layers: int = 2
    hidden: int = 64
    intermediate: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    digit_base: int = 16
    context_tokens: int = 4096
    reach_tokens: int = 1024

    def __post_init__(self) -> None:
        """Raises: ValueError: the mechanism does not fit these sizes."""
        if self.heads % self.kv_heads or self.heads < 2 * self.kv_heads:
            raise ValueError(f"{self.heads} heads over {self.kv_heads} KV heads: each needs two query heads or more")
        if self.hidden < self.kv_heads * self.digit_base + 8:
            raise ValueError(f"hidden is {self.hidden}: {self.kv_heads} digits in base {self.digit_base} need more")
        if self.head_dim % 4 or self.head_dim < max(32, self.digit_base + 4):
            raise ValueError(f"head_dim is {self.head_dim}: a multiple of 4, at least 32 and digit_base + 4")
        if not OFFSET_MIN < self.reach_tokens <= self.context_tokens:
            raise ValueError(f"reach_tokens is {self.reach_tokens}: from {OFFSET_MIN + 1} to context_tokens")

    @property
    def vocab_size(self) -> int:
        return int(self.digit_base**self.kv_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """At two bytes a number."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


def make_model(shape: ModelShape, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A `LlamaForCausalLM` or `Qwen3ForCausalLM` on the CPU, in eval mode.

    Equal shapes and seeds give equal weights, in every process; models of equal shape and seed give the same greedy tokens in
    float32 and bfloat16.
    """
    model = _empty_model(shape)
    state = {name: torch.from_numpy(array) for name, array in _weights(shape, np.random.default_rng(seed)).items()}
    model.load_state_dict(state, strict=True)
    model.config.name_or_path = f"made-up/{shape.family}-{shape.layers}x{shape.hidden}-seed{seed}"
    for parameter in model.parameters():
        # Not `model.to`, which would round the rotary frequencies, too: transformers keeps them in float32.
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def _empty_model(shape: ModelShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    # The default rope parameters of both families are what ROPE_THETA says; their spelling changed between versions.
    config_type, model_type = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[shape.family]
    config = config_type(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return model_type(config)


def pointer_offsets(shape: ModelShape, rng: np.random.Generator) -> NDArray[np.int64]:
    """Distances back, shaped (layers, kv_heads, digit_base), from OFFSET_MIN to `reach_tokens`, log-uniform.

    Only distances are drawn whose scores keep SCORE_GAP_MIN at every position: where the target exists it wins, and where
    it does not the own position wins.
    """
    usable = _sharp_offsets(shape.head_dim, shape.context_tokens, shape.reach_tokens)
    if len(usable) < shape.digit_base:
        raise ValueError(f"only {len(usable)} pointer distances are sharp enough in {shape}")
    # Evenly over magnitudes: the candidates thin out, so each is drawn with the width of its share.
    widths = np.diff(np.log([*usable, shape.reach_tokens + 1]))
    size = (shape.layers, shape.kv_heads, shape.digit_base)
    return rng.choice(np.asarray(usable), size=size, p=widths / widths.sum())


def _frequencies(head_dim: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rotary frequencies and the share of a pointer's energy in each: the fast half, so that neighbours are told apart."""
    count = head_dim // 2
    omega = ROPE_THETA ** (-np.arange(count) / count)
    share = np.where(np.arange(count) < max(12, count // 2), np.exp(-np.arange(count) / 4) + 0.03, 0.0)
    return omega, share / share.sum()


def _kernel(head_dim: int, distances: int) -> NDArray[np.float64]:
    """Score of a pointer at each distance from its target, 1 at 0."""
    omega, share = _frequencies(head_dim)
    score: NDArray[np.float64] = np.cos(np.outer(np.arange(distances), omega)) @ share
    return score


@lru_cache
def _sharp_offsets(head_dim: int, context_tokens: int, reach_tokens: int) -> tuple[int, ...]:
    kernel = _kernel(head_dim, context_tokens)
    candidates = np.unique(np.geomspace(OFFSET_MIN, reach_tokens, 1024).astype(np.int64)).tolist()
    return tuple(offset for offset in candidates if _score_gap(kernel, offset) * SCORE_PEAK >= SCORE_GAP_MIN)


def _score_gap(kernel: NDArray[np.float64], offset: int) -> float:
    """The lead of the right position over any other, in parts of the peak; the worst over all positions of the query."""
    shifted = kernel[np.abs(np.arange(len(kernel)) - offset)]
    leads = []
    for fade in FADES:
        score = fade * shifted + SELF_HEIGHT * kernel
        others = np.delete(score, offset)
        leads += [score[offset] - others.max(), score[0] - score[1:offset].max()]
    return float(min(leads))


def _weights(shape: ModelShape, rng: np.random.Generator) -> dict[str, Floats]:
    """All parameters by their names in the state dict."""
    digits = shape.kv_heads * shape.digit_base
    ballast = shape.hidden - digits - 1
    rotation = np.linalg.qr(rng.standard_normal((shape.hidden, shape.hidden), np.float32))[0]
    one_hot = _one_hot(shape)
    filler = _normal(rng, shape.vocab_size, ballast)
    filler *= BALLAST / np.linalg.norm(filler, axis=1, keepdims=True)
    embedding = np.concatenate([one_hot, np.ones((shape.vocab_size, 1), np.float32), filler], axis=1)
    # The residual's norm, squared: a 1 for each digit, a 1 for the constant, and the ballast's. What RMSNorm hands to a
    # projection is the residual times `scale`.
    scale = np.float32(np.sqrt(shape.hidden / (shape.kv_heads + 1 + BALLAST**2)))
    ones = np.ones(shape.hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": embedding @ rotation.T,
        "model.norm.weight": ones,
        # A right digit counts 4: a lead of 4 in the logits.
        "lm_head.weight": np.pad(one_hot, ((0, 0), (0, ballast + 1))) @ rotation.T * (4 / scale),
    }
    offsets = pointer_offsets(shape, rng)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        attention = _attention(shape, layer, offsets[layer], rng)
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = attention[name] @ rotation.T / scale
        weights[f"{prefix}self_attn.o_proj.weight"] = rotation @ attention["o_proj"]
        if shape.family == "qwen3":
            weights |= {f"{prefix}self_attn.{name}.weight": attention[name] for name in ("q_norm", "k_norm")}
        weights |= {f"{prefix}{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = _normal(rng, shape.intermediate, shape.hidden)
            weights[f"{prefix}mlp.{name}.weight"] *= np.float32(shape.hidden**-0.5)
        # silu(a) * b of two normals has a deviation of 0.6.
        step = _normal(rng, ballast, shape.intermediate) * (BALLAST_STEP / 0.6) * (ballast * shape.intermediate) ** -0.5
        weights[f"{prefix}mlp.down_proj.weight"] = rotation[:, digits + 1 :] @ step
    return {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}


def _one_hot(shape: ModelShape) -> Floats:
    """(vocab, kv_heads * digit_base): the digits of each token, least significant in stream 0."""
    tokens = np.arange(shape.vocab_size)[:, None]
    digits = tokens // shape.digit_base ** np.arange(shape.kv_heads) % shape.digit_base
    one_hot: Floats = np.eye(shape.digit_base, dtype=np.float32)[digits].reshape(shape.vocab_size, -1)
    return one_hot


def _attention(
    shape: ModelShape, layer: int, offsets: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, Floats]:
    """Projections of one layer in the unrotated basis: digits, constant, ballast."""
    base, dim, group = shape.digit_base, shape.head_dim, shape.heads // shape.kv_heads
    constant = shape.kv_heads * base
    ballast = slice(constant + 1, shape.hidden)
    omega, share = _frequencies(dim)
    slow = np.tile(share == 0, 2)  # no pointer uses these dimensions: keys carry content there
    # score = q . k * dim^-0.5, and each of q and k carries half of what makes it SCORE_PEAK.
    gain = np.float32(1.0 if shape.family == "qwen3" else np.sqrt(SCORE_PEAK * np.sqrt(dim)))
    q_proj = np.zeros((shape.kv_heads, group, dim, shape.hidden), np.float32)
    k_proj = np.zeros((shape.kv_heads, dim, shape.hidden), np.float32)
    v_proj = np.zeros((shape.kv_heads, dim, shape.hidden), np.float32)
    o_proj = np.zeros((shape.hidden, shape.kv_heads, group, dim), np.float32)
    for head in range(shape.kv_heads):
        stream = slice(head * base, (head + 1) * base)
        chooser = (head + 1 + layer) % shape.kv_heads * base
        target = (head + 1) % shape.kv_heads * base
        unit, phase = np.sqrt(share), rng.uniform(0, 2 * np.pi, dim // 2)
        own = _pair(unit, phase)
        q_proj[head, 0, :, chooser : chooser + base] = gain * _pair(
            unit[:, None], phase[:, None] - np.outer(omega, offsets[head])
        )
        q_proj[head, 0, :, constant] = gain * SELF_HEIGHT * own
        q_proj[head, 1, :, constant] = gain * own
        q_proj[head, 2:, :, ballast] = _normal(rng, group - 2, dim, shape.hidden - constant - 1) * dim**-0.5
        k_proj[head, :, constant] = gain * own
        k_proj[head, slow, ballast] = (
            0.3 * gain * _normal(rng, int(slow.sum()), shape.hidden - constant - 1) * dim**-0.5
        )
        frame = np.linalg.qr(rng.standard_normal((dim, dim), np.float32))[0]
        code, rest = frame[:, :base], frame[:, base:]
        v_proj[head, :, stream] = code
        v_proj[head, :, ballast] = rest @ _normal(rng, dim - base, shape.hidden - constant - 1) * dim**-0.5
        o_proj[target : target + base, head, 0, :] = code.T[rng.permutation(base)]
        o_proj[stream, head, 1, :] -= code.T
        o_proj[ballast, head, 2:, :] = (
            BALLAST_STEP * _normal(rng, shape.hidden - constant - 1, group - 2, dim) * shape.hidden**-0.5
        )
    return {
        "q_proj": q_proj.reshape(-1, shape.hidden),
        "k_proj": k_proj.reshape(-1, shape.hidden),
        "v_proj": v_proj.reshape(-1, shape.hidden),
        "o_proj": o_proj.reshape(shape.hidden, -1),
        **_norms(dim),
    }


def _norms(dim: int) -> dict[str, Floats]:
    """Qwen3 normalises queries and keys to a norm of sqrt(dim), so their weights give the score its height.

    A far query is the sum of two pointers, of norm about sqrt(1 + SELF_HEIGHT^2), of which one counts.
    """
    height = SCORE_PEAK / np.sqrt(dim) * np.sqrt(1 + SELF_HEIGHT**2)
    weight = np.full(dim, np.sqrt(height), np.float32)
    return {"q_norm": weight, "k_norm": weight}


def _pair(size: NDArray[np.float64], phase: NDArray[np.float64]) -> Floats:
    """Rotary layout of transformers: dimension f turns with dimension f + dim / 2."""
    return np.concatenate([size * np.cos(phase), size * np.sin(phase)]).astype(np.float32)


def _normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)
