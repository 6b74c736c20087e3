"""A GPT as current open models build it, its byte-level tokenizer, and model folders in and out.

RMSNorm, rotary positions (RoPE), SwiGLU, grouped-query attention and a preallocated KV cache, as the Llama, Qwen2 and
Qwen3 families have them, at three sizes for a laptop.  `python model.py` prints the sizes and samples a few tokens.

Shapes: B rows, T new tokens, S attended to, D hidden, F MLP, H query heads, K key/value heads, E head, V vocabulary.
"""
import json
import unicodedata
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT, named as in Hugging Face's config.json.  `vocab_size` counts the tokenizer's ids; the matrix may
    be padded to more rows, which must never be sampled nor enter a softmax, so `logits` stops at `vocab_size`."""
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
    rope_scaling: dict = None           # Llama 3.1's, as in config.json
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False        # Qwen2 adds a bias to q, k and v
    qk_norm: bool = False               # Qwen3 normalises q and k of each head before RoPE
    eos_token_ids: tuple = (256,)       # any of them ends an answer


SIZES = {
    "tiny": GPTConfig(),
    "small": GPTConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=5, head_dim=32),
    "base": GPTConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=7, num_attention_heads=8,
                      num_key_value_heads=4, head_dim=32),
}


class KVCache:
    """Keys and values of all layers; the columns [0, length) are filled.  Prompts are padded on the LEFT, so that rows
    write the same column and attention reads one slice.  `padding` (B,) counts each row's first columns, all masked."""
    def __init__(self, config, padding, columns, dtype=torch.float32):
        shape = (len(padding), config.num_key_value_heads, columns, config.head_dim)
        # Keys, then values, of each layer: a tensor each, as compiled code copies all of one that holds several.
        self.kv = [torch.empty(shape, dtype=dtype, device=padding.device) for _ in range(2 * config.num_hidden_layers)]
        self.padding, self.length, self.config = padding, 0, config
        # Finite, not -inf: a query that sees nothing but padding gets finite garbage that nobody reads, not NaN.
        hidden = torch.arange(columns, device=padding.device) < padding[:, None]                    # (B, columns)
        self.bias = torch.where(hidden, torch.finfo(dtype).min / 2, 0.0).to(dtype)[:, None, None]   # (B, 1, 1, columns)

    def take_rows(self, rows, columns):
        """A new cache with the given rows of this one, in that order: repeats a prompt."""
        taken = KVCache(self.config, self.padding[rows], columns, self.kv[0].dtype)
        taken.length = self.length
        for old, new in zip(self.kv, taken.kv):
            new[:, :, :self.length] = old[rows, :, :self.length]
        return taken

    def keep_rows(self, rows):
        """Keep the given rows alone, in place and in that order; only a row that changes its place is copied."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for filled in self.kv:
            filled[moved, :, :self.length] = filled[rows[moved], :, :self.length]
        self.kv, self.padding, self.bias = [x[:len(rows)] for x in self.kv], self.padding[rows], self.bias[rows]

    def write(self, layer, k, v):
        """Append k, v (B, K, T, E) of one layer; returns all filled keys and values (B, K, S, E)."""
        (keys, values), start, end = self.kv[2 * layer:2 * layer + 2], self.length, self.length + k.shape[2]
        keys[:, :, start:end], values[:, :, start:end] = k, v
        return keys[:, :, :end], values[:, :, :end]                                                 # (B, K, S, E) each

    def mask(self, new):
        """The additive mask (B, 1, new, S) of `new` queries that are about to be written."""
        bias = self.bias[..., :self.length + new]                                                   # (B, 1, 1, S)
        later = new > 1 and bias.new_ones(new, bias.shape[3], dtype=torch.bool).triu(self.length + 1)           # (T, S)
        return bias if new == 1 else bias.masked_fill(later, torch.finfo(bias.dtype).min / 2)       # (B, 1, T, S)


def rotate(x, cos, sin):
    """Rotary position embedding (arXiv 2104.09864) of x (B, heads, T, E): element i turns with element i + E/2.
    cos and sin (B or 1, 1, T, E); the first half of sin carries the minus sign of the rotation."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin                                             # (B, heads, T, E)


class Block(nn.Module):
    """One transformer layer: grouped-query attention, then SwiGLU, each behind an RMSNorm and added to the residual."""
    def __init__(self, config, layer):
        super().__init__()
        c, self.layer = config, layer
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.attention_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * c.head_dim, bias=c.attention_bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None for _ in range(2))
        self.out = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def attention(self, x, cos, sin, cache, mask):
        """What each token (B, T, D) gathers from the tokens up to it: (B, T, D); mask None means causal."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)                             # (B, H + 2K, T, E)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q.to(x.dtype)), self.k_norm(k.to(x.dtype))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)                     # (B, H or K, T, E)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)                                                    # (B, K, S, E)
        if folded := cache is not None and T == 1:      # heads that share a key stand where a sequence's queries would:
            q = q.reshape(B, self.kv_heads, -1, self.head_dim)          # (B, K, H/K, E), faster than repeated keys
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                               enable_gqa=not folded and self.heads != self.kv_heads)        # as q
        return self.out((mixed if folded else mixed.transpose(1, 2)).reshape(B, T, -1))             # (B, T, D)

    def forward(self, x, cos, sin, cache=None, mask=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache, mask)                       # (B, T, D)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)                                  # (B, T, F) each
        return x + self.down(F.silu(gate) * up)                                                     # (B, T, D)


class GPT(nn.Module):
    """`model(tokens)` gives hidden states; `model.logits(hidden)`, often the dearer half, scores for selected ones."""
    def __init__(self, config):
        super().__init__()
        c, self.config, self.files = config, config, BYTE_FILES     # files: texts that `save_pretrained` writes, too
        self.embed = nn.Embedding(c.embedding_rows, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.embedding_rows, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # As in GPT-2, layers that add to the residual start smaller, so its variance does not grow with depth.
                depth = (2 * c.num_hidden_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 if name.startswith(("embed", "lm_head")) else p.shape[1] ** -0.5 * depth)
        turn = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)                    # (E/2,)
        if s := c.rope_scaling:         # Llama 3.1 slows the pairs that turn little within the original context
            turns = s["original_max_position_embeddings"] * turn / (2 * torch.pi)                   # (E/2,)
            kept = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])  # (E/2,)
            turn = turn * (kept.clamp(0, 1) + (1 - kept.clamp(0, 1)) / s["factor"])                 # (E/2,)
        angle = torch.outer(torch.arange(c.max_position_embeddings), turn)                          # (context, E/2)
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1), persistent=False)    # (context, E)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], -1), persistent=False)   # (context, E)

    def forward(self, tokens, cache=None, positions=None):
        """Hidden states (B, T, D) of tokens (B, T), which are appended to a cache; without one, right padding needs no
        mask, as nothing looks ahead.  `positions` (B, T) overrides the positions.  ValueError past the context."""
        T, start, limit, padding = tokens.shape[1], 0, self.config.max_position_embeddings, 0
        if cache is not None:
            start, limit, padding = cache.length, min(limit, cache.kv[0].shape[2]), cache.padding[:, None]
        if start + T > limit:           # not by _require: --compile would compile anew for each T that its text names
            raise ValueError(f"{start + T} tokens do not fit the context of {limit}")
        mask = None if cache is None else cache.mask(T)                                             # (B, 1, T, S)
        if positions is None:
            positions = (torch.arange(start, start + T, device=tokens.device)[None] - padding).clamp(min=0)   # (B, T)
        x = self.embed(tokens)                                                                      # (B, T, D)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]                       # (B or 1, 1, T, E)
        for block in self.blocks:
            x = block(x, cos, sin, cache, mask)                                                     # (B, T, D)
        if cache is not None:
            cache.length = start + T
        return self.norm(x)                                                                         # (B, T, D)

    def logits(self, hidden):
        """Scores (..., V) of the next token for hidden states (..., D); rows that only pad the matrix are left out."""
        return F.linear(hidden, (self.lm_head or self.embed).weight[:self.config.vocab_size])       # (..., V)

    def save_pretrained(self, folder):
        """Write a folder that transformers, vLLM and `load_pretrained` load; weights keep their dtype.  The tokenizer
        is the one that the model was loaded with; a model made here gets the byte tokenizer."""
        _require(find_spec("safetensors"), "model folders need safetensors: pip install safetensors", ImportError)
        from safetensors.torch import save_file
        c, folder = self.config, Path(folder)
        family = {extras: name for name, extras in FAMILIES.items()}[c.attention_bias, c.qk_norm]
        eos = {"eos_token_id": list(c.eos_token_ids)}
        config = asdict(c) | eos | {            # attention_bias means one of all four projections in these files
            "model_type": family, "architectures": [family.capitalize() + "ForCausalLM"], "attention_bias": False,
            "vocab_size": c.embedding_rows, "torch_dtype": str(self.embed.weight.dtype).removeprefix("torch.")}
        texts = self.files | {"config.json": json.dumps(config, indent=2), "generation_config.json": json.dumps(eos)}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        weights = {name: view.cpu().clone() for name, view in folder_tensors(self).items()}   # it refuses shared memory
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# What a family adds to Llama (attention_bias, qk_norm); what we know of config.json's settings, the default first; and
# our layers with the tensors of a folder that they hold, one below the other.
FAMILIES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
KNOWN = {"model_type": (*FAMILIES,), "rope_type": ("default", "llama3"), "hidden_act": ("silu",), "mlp_bias": (False,),
         "attention_bias": (False,), "use_sliding_window": (False,), "partial_rotary_factor": (1,)}
TENSORS = {"embed": ["model.embed_tokens"], "attention_norm": ["input_layernorm"], "out": ["self_attn.o_proj"],
           "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "q_norm": ["self_attn.q_norm"],
           "k_norm": ["self_attn.k_norm"], "mlp_norm": ["post_attention_layernorm"], "down": ["mlp.down_proj"],
           "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "norm": ["model.norm"], "lm_head": ["lm_head"]}


def folder_tensors(model):
    """{name of a tensor in a model folder: the view of our parameter that holds it}."""
    c, views = model.config, {}
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = {"qkv": [q, kv, kv], "gate_up": [c.intermediate_size] * 2}
    for name, parameter in model.named_parameters():
        *block, layer, kind = name.split(".")                       # such as blocks, 3, qkv, weight
        for part, view in zip(TENSORS[layer], parameter.detach().split(rows.get(layer, len(parameter)))):
            views[f"model.layers.{block[1]}.{part}.{kind}" if block else f"{part}.{kind}"] = view
    return views


def load_pretrained(folder, device="cpu", dtype=torch.float32):
    """(model, tokenizer) of a Hugging Face folder of the Llama, Qwen2 (also 2.5) or Qwen3 family.  ValueError, in one
    line, names what is missing, unknown or does not fit; ImportError without safetensors."""
    _require(find_spec("safetensors"), "model folders need safetensors: pip install safetensors", ImportError)
    from safetensors import SafetensorError, safe_open
    folder = Path(folder)
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    try:
        shards, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
        if index.exists() and not shards[0].exists():
            shards = sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        for path in (folder / "config.json", folder / "tokenizer.json", *shards):
            _require(path.exists() and path.stat().st_size > 200, f"{path} is missing, or not yet fetched by git-lfs")
        texts = {name: (folder / name).read_text(encoding="utf-8") for name in names if (folder / name).exists()}
        tokenizer = read_tokenizer(texts["tokenizer.json"])
        with torch.device(device):
            model = GPT(_read_config(texts, tokenizer.n_vocab)).to(dtype)
        model.files, views = texts, folder_tensors(model)
        for path in shards:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" and model.lm_head is None:
                        continue                                    # computed here, or the same as the embedding
                    _require(name in views, f"{path}: tensor {name} has no place in this model")
                    tensor, view = file.get_tensor(name), views.pop(name)
                    _require(tensor.shape == view.shape, f"{path}: {name} is {[*tensor.shape]}, not {[*view.shape]}")
                    view.copy_(tensor)
        _require(not views, f"{folder}: tensor {min(views, default=None)} is missing")
    except (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path if type(error) is SafetensorError else folder}: cannot be read, {error!r}") from error
    return model, tokenizer


def _read_config(texts, tokens):
    file = json.loads(texts["config.json"])
    rope = file.get("rope_parameters") or file.get("rope_scaling") or {}    # transformers 5 has rope_theta in here
    c = {"model_type": None, "rope_theta": 10_000.0, "tie_word_embeddings": False} | file | rope
    c["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    c |= {n: v for n, v in json.loads(texts.get("generation_config.json", "{}")).items() if n == "eos_token_id"}
    for name in ("hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size rms_norm_eps "
                 "max_position_embeddings eos_token_id").split():
        _require(c.get(name) is not None, f"config.json: {name} is missing")
    for name, known in KNOWN.items():
        _require(c.get(name, known[0]) in known, f"config.json: {name} {c.get(name)} is unknown, known is {known}")
    _require("sliding_attention" not in (c.get("layer_types") or ()), "config.json: sliding_attention is unknown")
    _require(tokens <= c["vocab_size"], f"tokenizer.json has {tokens} tokens, the embedding {c['vocab_size']} rows")
    (attention_bias, qk_norm), eos = FAMILIES[c["model_type"]], c["eos_token_id"]
    c |= {"vocab_size": tokens, "embedding_rows": c["vocab_size"], "attention_bias": attention_bias, "qk_norm": qk_norm,
          "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
          "num_key_value_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
          "rope_scaling": rope | {"rope_type": "llama3"} if c["rope_type"] == "llama3" else None,
          "eos_token_ids": tuple(map(int, eos)) if isinstance(eos, list) else (int(eos),)}
    return GPTConfig(**{field.name: c[field.name] for field in fields(GPTConfig)})


def _require(condition, message, error=ValueError):
    if not condition:
        raise error(message)


class FolderEncoding(tiktoken.Encoding):
    """An Encoding with two habits of model folders: Qwen normalises text to NFC; SmolLM2 has no token for some bytes
    (`absent`), which transformers leaves out after cutting the text into words and before merging."""
    def encode_ordinary(self, text):
        """The ids of a text in which nothing is a special token, whatever it says."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        data = text.encode("utf-8", "replace")
        if data.translate(None, self.absent) == data:
            return super().encode_ordinary(text)
        from regex import findall               # tiktoken depends on it too; slower, but such text is rare
        words = (word.encode("utf-8", "replace").translate(None, self.absent) for word in findall(self._pat_str, text))
        return [id for word in words if word for id in self._encode_single_piece(word)]


# Byte-level BPE files write a byte as a printable character: itself, or for the others, in order, those from 256 on.
_others = iter(range(256, 512))
BYTES = {chr(b if 33 <= b <= 126 or 161 <= b != 173 else next(_others)): b for b in range(256)}
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"    # GPT-2's cut, the default


def read_tokenizer(text):
    """The Encoding that equals a tokenizer.json (byte-level BPE), token for token.  ValueError names what is not known.
    Added tokens, Qwen3's <think> and a BOS too, are special: a template sets them (allowed_special="all"), no user."""
    file = json.loads(text)
    bpe, normalizer, cut = (file.get(part) or {} for part in ("model", "normalizer", "pre_tokenizer"))
    _require(bpe.get("type", "BPE") == "BPE", f"tokenizer.json: model {bpe.get('type')} is unknown, known is BPE")
    normalizers = normalizer.get("normalizers", [normalizer])
    _require(normalizers in ([], [{}], [{"type": "NFC"}]), f"tokenizer.json: normalizer {normalizer} is unknown")
    match [{"use_regex": True} | step for step in cut.get("pretokenizers", [cut])]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            pattern = WORDS
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:   # a digit ends the text before it
            pattern = WORDS.replace(r" ?\p{N}+", r"\p{N}").replace(r"\S", r"[^\s\p{N}]")
        case [{"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            pattern = rf"{words}|(?:(?!{words})[\s\S])+"            # what the words leave over is a word, too
        case _:
            raise ValueError(f"tokenizer.json: pre_tokenizer {cut} is unknown")
    vocab = bpe["vocab"]
    ranks = {bytes([b]): vocab[character] for character, b in BYTES.items() if character in vocab}
    # A merge is "a b" or ["a", "b"].  tiktoken merges the pair whose token has the lowest id, a file its first pair.
    merged = {token: vocab[token] for token in ("".join(pair).replace(" ", "") for pair in bpe["merges"])}
    _require([*merged.values()] == sorted(merged.values()), "tokenizer.json: ids do not rise along the merges")
    ranks |= {bytes(map(BYTES.get, token)): id for token, id in merged.items()}
    specials = {token["content"]: token["id"] for token in file.get("added_tokens") or []}
    known = {*ranks.values(), *specials.values()}       # a model may sample other ids: decoding must not fail then
    specials |= {f"<|unused {id}|>": id for id in range(max(known)) if id not in known}
    encoding = FolderEncoding("folder", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    encoding.nfc, encoding.absent = {"type": "NFC"} in normalizers, bytes(b for c, b in BYTES.items() if c not in vocab)
    return encoding


# The tokenizer of our own models, written as a folder has it: byte-level BPE without merges, and three special tokens.
_cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
_added = [{"id": 256 + i, "content": name} | _flags for i, name in enumerate(("<|eos|>", "<|question|>", "<|answer|>"))]
_bytes_only = {"version": "1.0", "added_tokens": _added, "pre_tokenizer": _cut, "decoder": _cut,
               "model": {"type": "BPE", "vocab": BYTES, "merges": []}}
BYTE_FILES = {"tokenizer.json": json.dumps(_bytes_only), "tokenizer_config.json": json.dumps(
    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"})}


def byte_tokenizer():
    """A tiktoken Encoding of the 256 bytes and three special tokens; nothing is downloaded."""
    return read_tokenizer(BYTE_FILES["tokenizer.json"])


if __name__ == "__main__":
    import rollout
    torch.manual_seed(0)
    print("size    parameters  forward MFLOPs a token, full context   KV-cache bytes a token")
    for size, c in SIZES.items():
        model, width = GPT(c), c.num_hidden_layers * c.head_dim
        weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + c.hidden_size * c.vocab_size
        flops = 2 * weights + 4 * width * c.num_attention_heads * c.max_position_embeddings
        count, cache = sum(p.numel() for p in model.parameters()), 4 * 2 * width * c.num_key_value_heads     # fp32
        print(f"{size:6} {count:11,} {flops / 1e6:23.2f} {cache:32,}")
    tokenizer, model = byte_tokenizer(), GPT(SIZES["tiny"])
    for answer in rollout.generate(model, [tokenizer.encode("12 + 7 =")], 2, 24, model.config.eos_token_ids).answers():
        print("untrained, tiny answers", repr(tokenizer.decode(answer)))
