"""A GPT as current open models build it, its byte-level tokenizer, and model folders in and out.

RMSNorm, rotary positions (RoPE), SwiGLU, grouped-query attention and a preallocated KV cache: the architecture that the Llama,
Qwen2 and Qwen3 families share, at three sizes that train on a laptop.  `python model.py` prints the sizes and samples a few tokens.

Shapes: B rows, T new tokens, S tokens attended to, D hidden size, H query heads, K key/value heads, E head size, V vocabulary.
"""
from dataclasses import dataclass, replace

import tiktoken
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT, under the names that Hugging Face's config.json uses for them.

    `vocab_size` counts the ids that exist in the tokenizer.  `embedding_rows` may be larger: pretrained models pad the matrix to a
    round number, and the padding must never be sampled nor enter a softmax, so `logits` stops at `vocab_size`.
    """
    hidden_size: int = 64
    intermediate_size: int = 176
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 259
    embedding_rows: int = 264
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False        # Qwen2 adds a bias to q, k and v
    qk_norm: bool = False               # Qwen3 normalises q and k of each head before RoPE


SIZES = {
    "tiny": GPTConfig(),
    "small": GPTConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=5, head_dim=32),
    "base": GPTConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=7, num_attention_heads=8, num_key_value_heads=4,
                      head_dim=32),
}


class KVCache:
    """Keys and values of all layers, written in place; the columns [0, length) are filled.

    Prompts of different lengths are padded on the LEFT, so that every row writes the same column and attention reads one slice.
    `padding` (B,) counts the padding columns of each row; they are masked, and positions start after them.
    """

    def __init__(self, config, padding, columns, dtype=torch.float32):
        shape = (config.num_hidden_layers, len(padding), config.num_key_value_heads, columns, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=padding.device)     # (layers, B, K, columns, E)
        self.values = torch.empty_like(self.keys)                              # (layers, B, K, columns, E)
        self.padding, self.length, self.config = padding, 0, config
        # Finite, not -inf: a query that sees nothing but padding gets finite garbage that nobody reads, not NaN.
        hidden = torch.arange(columns, device=padding.device) < padding[:, None]                    # (B, columns)
        self.bias = torch.where(hidden, torch.finfo(dtype).min / 2, 0.0).to(dtype)[:, None, None]   # (B, 1, 1, columns)

    def take_rows(self, rows, columns=None):
        """A new cache with the given rows of this one, in that order: repeats a prompt for its group, drops finished answers."""
        columns = columns or self.keys.shape[3]
        taken = KVCache(self.config, self.padding[rows], columns, self.keys.dtype)
        taken.length = self.length
        taken.keys[:, :, :, :self.length] = self.keys[:, rows, :, :self.length]
        taken.values[:, :, :, :self.length] = self.values[:, rows, :, :self.length]
        return taken

    def write(self, layer, k, v):
        """Append k, v (B, K, T, E) of one layer; returns all filled keys and values (B, K, S, E)."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def mask(self, new):
        """The additive mask (B, 1, new, S) of `new` queries that are about to be written."""
        bias = self.bias[..., :self.length + new]                                                   # (B, 1, 1, S)
        if new == 1:
            return bias
        future = torch.ones(new, self.length + new, dtype=torch.bool, device=bias.device).triu(self.length + 1)  # (T, S)
        return bias.masked_fill(future, torch.finfo(bias.dtype).min / 2)                            # (B, 1, T, S)


def rotate(x, cos, sin):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of x (B, heads, T, E): element i turns with i + E/2.

    cos and sin (B or 1, 1, T, E); the first half of sin carries the minus sign of the rotation.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)                                # (B, heads, T, E)


class Block(nn.Module):
    """One transformer layer: grouped-query attention, then SwiGLU, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config, layer):
        super().__init__()
        c, self.layer = config, layer
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.attention_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * c.head_dim, bias=c.attention_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.out = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def attention(self, x, cos, sin, cache, mask):
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)                             # (B, H + 2K, T, E)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)                                            # (B, H, T, E)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)                                            # (B, K, T, E)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)                                                    # (B, K, S, E)
        if cache is not None and T == 1:
            # The heads that share a key stand where the queries of a sequence would: half the time of repeating the keys.
            q = q.view(B, self.kv_heads, -1, self.head_dim)                                         # (B, K, H/K, E)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)                         # (B, K, H/K, E)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                                   enable_gqa=self.heads != self.kv_heads)          # (B, H, T, E)
            mixed = mixed.transpose(1, 2)                                                           # (B, T, H, E)
        return self.out(mixed.reshape(B, T, -1))                                                    # (B, T, D)

    def forward(self, x, cos, sin, cache=None, mask=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache, mask)                       # (B, T, D)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)                                  # (B, T, F) each
        return x + self.down(F.silu(gate) * up)                                                     # (B, T, D)


class GPT(nn.Module):
    """A decoder-only transformer.  `model(tokens)` gives hidden states, `model.logits(hidden)` the vocabulary scores.

    The two are apart because the vocabulary projection is often the dearer half, and only selected tokens need it.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.embedding_rows, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.embedding_rows, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # GPT-2's init: layers that add to the residual stream start smaller, so that its variance does not grow with depth.
                depth = (2 * config.num_hidden_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * depth if name.startswith(("embed", "lm_head")) else p.shape[1] ** -0.5 * depth)
        inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)     # (E/2,)
        angle = torch.outer(torch.arange(config.max_position_embeddings), inverse)                  # (context, E/2)
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1), persistent=False)    # (context, E)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], -1), persistent=False)   # (context, E)

    def forward(self, tokens, cache=None, positions=None):
        """Hidden states (B, T, D) of tokens (B, T), each from the tokens up to and with itself.

        Without a cache rows start at position 0, and right padding needs no mask: causal attention never looks ahead.  With a cache
        the tokens are appended to it.  `positions` (B, T) overrides the positions.  ValueError past the context length.
        """
        T, mask = tokens.shape[1], None
        reached = T + (cache.length if cache is not None else 0)
        limit = min(self.config.max_position_embeddings, cache.keys.shape[3] if cache is not None else reached)
        if reached > limit:
            raise ValueError(f"{reached} tokens do not fit the context of {limit}")
        if cache is not None:
            mask = cache.mask(T)                                                                    # (B, 1, T, S)
        if positions is None:
            positions = torch.arange(reached - T, reached, device=tokens.device)[None]              # (1, T)
            if cache is not None:
                positions = (positions - cache.padding[:, None]).clamp(min=0)                       # (B, T)
        x = self.embed(tokens)                                                                      # (B, T, D)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]                       # (B or 1, 1, T, E)
        for block in self.blocks:
            x = block(x, cos, sin, cache, mask)                                                     # (B, T, D)
        if cache is not None:
            cache.length = reached
        return self.norm(x)                                                                         # (B, T, D)

    def logits(self, hidden):
        """Scores (..., V) of the next token for hidden states (..., D); rows that only pad the matrix are left out."""
        weight = self.embed.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight[:self.config.vocab_size])                                    # (..., V)

    def num_parameters(self):
        """How many numbers are trained; a tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())


def byte_tokenizer():
    """A tiktoken Encoding of the 256 bytes and three special tokens; nothing is downloaded.

    `encode_ordinary` never yields a special token, whatever a user types; a template's specials are set in by
    `encode(..., allowed_special="all")`.
    """
    specials = {"<|eos|>": 256, "<|question|>": 257, "<|answer|>": 258}
    return tiktoken.Encoding("gmts-bytes", pat_str=r"(?s).", mergeable_ranks={bytes([b]): b for b in range(256)},
                             special_tokens=specials)
