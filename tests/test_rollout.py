"""rollout.py against an uncached forward of whole sequences, one answer at a time, and counts by hand."""
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import rollout as rollout_module
from gmts import token_stats
from model import GPT, GPTConfig
from rollout import (STEPS_PER_CHECK, Rollout, budgets, generate, micro_batches, pass_at_k, sample, score,
                     token_logits)

ROOT = Path(__file__).resolve().parents[1]
CONFIG = GPTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=8, vocab_size=13, embedding_rows=16, max_position_embeddings=48,
                   eos_token_ids=(11, 12))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1], [2, 2]]


def peaked_model(config=CONFIG, seed=0, sharp=8.0):
    """A model with opinions: answers end at different steps, entropies differ."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        model.embed.weight.mul_(sharp)
    return model


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(monkeypatch, value):
    """Let `sample` draw this number instead of a random one."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None, device=None: torch.full(shape, value))


# ------------------------------------------------------------------------------------------------------------- sampling

def test_temperature_zero_is_argmax():
    logits = torch.randn(50, 17)
    assert torch.equal(sample(logits, temperature=0), logits.argmax(dim=-1))
    assert sample(torch.tensor([[0.0, -math.inf, 3.0]]), 0).tolist() == [2]


@pytest.mark.parametrize("top_p, p, kept", [
    (0.9, [0.5, 0.41, 0.09], {0, 1}), (0.9, [0.09, 0.41, 0.5], {1, 2}), (0.5, [0.6, 0.3, 0.1], {0}),
    (0.95, [0.4, 0.3, 0.2, 0.1], {0, 1, 2, 3}), (0.01, [0.2, 0.5, 0.3], {1}), (1.0, [0.5, 0.41, 0.09], {0, 1, 2})])
def test_top_p_keeps_the_smallest_set(top_p, p, kept):
    drawn = sample(torch.tensor(p).log().expand(4000, -1), 1.0, top_p, gen())
    assert set(drawn.tolist()) == kept
    expected = torch.tensor([x if i in kept else 0.0 for i, x in enumerate(p)])
    torch.testing.assert_close(drawn.bincount(minlength=len(p)) / 4000, expected / expected.sum(), atol=0.04, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -math.inf])
    drawn = sample(logits.expand(20_000, -1), temperature, 1.0, gen())
    expected = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(drawn.bincount(minlength=5) / 20_000, expected, atol=0.015, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1e-45, 2 ** -24, 0.5, 1 - 2 ** -24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_token_of_probability_zero_is_never_drawn(monkeypatch, uniform, top_p):
    draw(monkeypatch, uniform)
    inf = math.inf
    for row in ([-inf, 0.0, -inf, 1.0, -inf], [-inf, -inf, 5.0], [0.0, -200.0, -inf], [-inf, 1e4, 0.0, -inf]):
        logits = torch.tensor([row])
        assert torch.softmax(logits, -1)[0, sample(logits, 1.0, top_p)] > 0


# ------------------------------------------------------------------------------------------------------------ rollouts

def reference_stats(model, rollout, temperature=1.0):
    """logprobs, entropy and norm (3, B, T) of an uncached forward, one row at a time, without padding."""
    stats = torch.zeros(3, *rollout.tokens.shape)
    for i in range(len(rollout.tokens)):
        start, end = int(rollout.prompt_lengths[i]), int(rollout.prompt_lengths[i] + rollout.answer_mask[i].sum())
        with torch.no_grad():
            logits = model.logits(model(rollout.tokens[i:i + 1, :end]))[0, start - 1:end - 1] / temperature
        stats[:, i, start:end] = torch.stack(token_stats(logits, rollout.tokens[i, start:end]))
    return stats


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_what_is_recorded_equals_an_uncached_forward(temperature, top_p):
    model = peaked_model()
    r = generate(model, PROMPTS, 5, 30, CONFIG.eos_token_ids, temperature, top_p, gen())
    lengths = r.answer_mask.sum(dim=1)
    assert r.finished.any() and not r.finished.all() or lengths.min() < STEPS_PER_CHECK < lengths.max()
    recorded = torch.stack([r.logprobs, r.entropy, r.logit_grad_norm])
    torch.testing.assert_close(recorded, reference_stats(model, r, temperature), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(recorded, score(model, r, temperature), atol=2e-5, rtol=1e-5)
    assert (recorded[:, ~r.answer_mask] == 0).all()


def test_shapes_and_prompts_are_kept():
    r = generate(peaked_model(), PROMPTS, 3, 9, CONFIG.eos_token_ids, generator=gen())
    assert r.tokens.shape == r.answer_mask.shape == r.logprobs.shape == r.entropy.shape and len(r.tokens) == 12
    for i, row in enumerate(r.tokens.tolist()):
        prompt = PROMPTS[i // 3]
        assert row[:len(prompt)] == prompt and int(r.prompt_lengths[i]) == len(prompt)
        start = len(prompt)
        n = int(r.answer_mask[i].sum())
        assert r.answer_mask[i].nonzero()[:, 0].tolist() == list(range(start, start + n)) and 1 <= n <= 9
        assert set(row[start + n:]) <= {0}


@pytest.mark.parametrize("seed", range(3))
def test_batched_is_one_by_one(seed):
    model = peaked_model(seed=seed)
    together = generate(model, PROMPTS, 2, 30, CONFIG.eos_token_ids, temperature=0)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], 1, 30, CONFIG.eos_token_ids, temperature=0)
        assert together.answers()[2 * i] == together.answers()[2 * i + 1] == alone.answers()[0]
        n = alone.tokens.shape[1]
        torch.testing.assert_close(together.logprobs[2 * i, :n], alone.logprobs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("check", [1, 2, 7, 100])
def test_when_rows_leave_the_batch_changes_nothing(monkeypatch, check):
    model = peaked_model()
    expected = generate(model, PROMPTS, 4, 30, CONFIG.eos_token_ids, temperature=0)
    monkeypatch.setattr(rollout_module, "STEPS_PER_CHECK", check)
    got = generate(model, PROMPTS, 4, 30, CONFIG.eos_token_ids, temperature=0)
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.answer_mask, expected.answer_mask)


def test_the_answers_of_a_group_differ_from_the_first_token_on():
    r = generate(GPT(CONFIG), [[1, 2, 3]], 64, 1, (), generator=gen())
    assert len(set(r.tokens[:, 3].tolist())) == CONFIG.vocab_size


def test_equal_seeds_equal_answers_and_the_global_state_is_left_alone():
    model = peaked_model()
    before = torch.get_rng_state()
    a, b, c = (generate(model, PROMPTS, 4, 12, CONFIG.eos_token_ids, generator=gen(seed)) for seed in (3, 3, 4))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)
    assert a.answers() != c.answers() and torch.equal(before, torch.get_rng_state())


def test_padding_rows_of_the_vocabulary_are_never_sampled():
    model = GPT(CONFIG)
    with torch.no_grad():
        model.embed.weight[CONFIG.vocab_size:] = 100.0
    r = generate(model, PROMPTS, 8, 20, (), temperature=5.0, generator=gen())
    assert int(r.tokens.max()) < CONFIG.vocab_size
    assert r.entropy.max() <= math.log(CONFIG.vocab_size) + 1e-5


def scripted(tokens, eos_ids, prompts=((1,),), max_new=None):
    """generate() where the model always says the next of `tokens`, whatever the prompt (T = 0)."""
    model = GPT(CONFIG)
    start = max(map(len, prompts))
    model.forward = lambda ids, cache=None, positions=None: _advance(cache, ids)
    model.logits = lambda hidden: F.one_hot(torch.tensor([tokens[model.at - start]] * len(hidden)), 13).float() * 50

    def _advance(cache, ids):
        cache.length += ids.shape[1]
        model.at = cache.length
        return torch.zeros(*ids.shape, CONFIG.hidden_size)
    return generate(model, [list(p) for p in prompts], 2, max_new or len(tokens), eos_ids, temperature=0)


@pytest.mark.parametrize("tokens, eos, kept, answer, finished", [
    ([5, 6, 11, 7, 7, 7], (11,), [5, 6, 11], [5, 6], True),
    ([5, 6, 12, 7, 11, 7], (11, 12), [5, 6, 12], [5, 6], True),           # the first of several EOS ids
    ([5, 11, 12, 11], (11, 12), [5, 11], [5], True),
    ([11, 5, 5], (11,), [11], [], True),                                  # an empty answer
    ([5, 6, 7], (11,), [5, 6, 7], [5, 6, 7], False),                      # cut off: the last token stays
    ([5, 6, 11], (11,), [5, 6, 11], [5, 6], True),                        # EOS as the very last one
    ([0, 0, 5, 0], (11,), [0, 0, 5, 0], [0, 0, 5, 0], False),             # the padding id is an ordinary token
    ([5, 0, 7, 7], (0,), [5, 0], [5], True),                              # EOS = padding id
    ([5] * 20 + [0] + [3] * 4, (0, 11), [5] * 20 + [0], [5] * 20, True),
])
def test_eos(tokens, eos, kept, answer, finished):
    for prompts in (((1,),), ((1, 0, 0), (2,), (0,))):
        r = scripted(tokens, eos, prompts)
        for i in range(2 * len(prompts)):
            assert r.tokens[i][r.answer_mask[i]].tolist() == kept
            assert r.answers()[i] == answer and bool(r.finished[i]) is finished


@pytest.mark.parametrize("prompts, match", [
    ([], "at least one token"), ([[]], "at least one token"), ([[1], []], "at least one token"),
    ([[1] * 40], "do not fit the context of 48"), ([[1], [1] * 39], "do not fit")])
def test_prompts_that_cannot_work(prompts, match):
    with pytest.raises(ValueError, match=match):
        generate(GPT(CONFIG), prompts, 2, 10, (11,))


def test_the_context_may_be_filled_to_the_last_token():
    r = generate(GPT(CONFIG), [[1] * 38, [2]], 2, 10, (), generator=gen())
    assert r.tokens.shape[1] == 48 and r.answer_mask.sum(dim=1).tolist() == [10] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("step", [0, 3, 9])
def test_logits_that_are_not_numbers_stop_with_the_step(bad, step):
    model, calls = GPT(CONFIG), []
    good = model.logits

    def logits(hidden):
        calls.append(1)
        return good(hidden).masked_fill(torch.arange(13) == 3, bad if len(calls) > step else 0.0)
    model.logits = logits
    with pytest.raises(FloatingPointError, match=f"step {step} "):
        generate(model, PROMPTS, 2, 12, (), generator=gen())


def test_bfloat16_cache_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        r = generate(peaked_model(sharp=2.0), PROMPTS, 3, 12, CONFIG.eos_token_ids, generator=gen())
    assert r.logprobs.dtype == torch.float32 and r.logprobs[r.answer_mask].isfinite().all()


# --------------------------------------------------------------------------------------------------- rows and micro-batches

def test_take_rows_and_join():
    model = peaked_model()
    a = generate(model, PROMPTS[:2], 2, 4, CONFIG.eos_token_ids, generator=gen())
    b = generate(model, PROMPTS[2:], 2, 20, CONFIG.eos_token_ids, generator=gen())
    both = Rollout.join([a, b])
    assert len(both.tokens) == 8 and both.tokens.shape[1] == max(a.tokens.shape[1], b.tokens.shape[1])
    assert both.answers() == a.answers() + b.answers()
    for name, value in vars(both.take_rows(torch.tensor([1, 6]))).items():
        if value.dim() == 1:
            assert value.tolist() == [vars(a)[name][1], vars(b)[name][2]], name
        else:
            for got, part in zip(value, (vars(a)[name][1], vars(b)[name][2])):
                assert torch.equal(got[:len(part)], part) and not got[len(part):].any(), name
    assert Rollout.join([a]).answers() == a.answers()
    torch.testing.assert_close(score(model, both)[0], both.logprobs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1, 17, 60, 10 ** 6])
def test_micro_batches_cover_each_needed_row_once(seed, budget):
    mask = torch.rand(12, 20, generator=gen(seed)) < 0.06
    seen = []
    for rows, width in micro_batches(mask, budget):
        assert len(rows) == 1 or len(rows) * width <= budget
        assert not mask[rows, width:].any() and mask[rows, width - 1].any()
        seen += rows.tolist()
    assert sorted(seen) == mask.any(dim=1).nonzero()[:, 0].tolist()


def test_no_marked_token_no_batch():
    assert list(micro_batches(torch.zeros(3, 4, dtype=torch.bool), 100)) == []
    assert list(micro_batches(torch.zeros(0, 4, dtype=torch.bool), 100)) == []


@pytest.mark.parametrize("budget", [1, 40, 10 ** 6])
def test_score_does_not_depend_on_the_budget(monkeypatch, budget):
    model = peaked_model()
    r = generate(model, PROMPTS, 3, 25, CONFIG.eos_token_ids, generator=gen())
    monkeypatch.setattr(rollout_module, "budgets", lambda model: (8, budget, ""))
    torch.testing.assert_close(score(model, r)[0], r.logprobs, atol=2e-5, rtol=1e-5)


def test_token_logits_are_those_of_the_place_before():
    model, tokens = peaked_model(), torch.randint(0, 13, (3, 9))
    row, column = torch.tensor([0, 2, 2]), torch.tensor([1, 4, 8])
    torch.testing.assert_close(token_logits(model, tokens, row, column), model.logits(model(tokens))[row, column - 1])


@pytest.mark.parametrize("heads", [2, 8])
def test_a_position_takes_at_most_what_the_budget_says(heads):
    c = GPTConfig(hidden_size=32, intermediate_size=96, num_attention_heads=heads, vocab_size=400, embedding_rows=400,
                  qk_norm=True)
    model, tokens, found = GPT(c), torch.randint(0, 400, (2, 101)), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    rows, positions, line = budgets(model)
    assert (rows, positions) == (512, 2048) and line.startswith("GB at most: weights 0.00")

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            found[t.untyped_storage().data_ptr()] = t
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.cross_entropy(model.logits(model(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())
    saved = sum(t.untyped_storage().nbytes() for t in found.values()) / 200
    position = 4 * (c.num_hidden_layers * (12 * max(32, heads * 16) + 6 * 96) + 3 * 400)
    assert 0.3 * position < saved < position


@pytest.mark.parametrize("config, gb, rows, positions", [       # Qwen2.5 0.5B and Qwen3 0.6B
    (dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
          head_dim=64, embedding_rows=151936, attention_bias=True), 1.98, 133, 707),
    (dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
          head_dim=128, embedding_rows=151936, qk_norm=True), 2.38, 16, 602)])
def test_budgets_of_large_models_are_small(config, gb, rows, positions):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=151665, **config))
    assert budgets(model, 1024)[:2] == (rows, positions)
    assert f"weights {gb:.2f}" in budgets(model, 1024)[2]


# ------------------------------------------------------------------------------------------------------------- measures

def rollout_of(mask, tokens=None, finished=None, entropy=None):
    mask = torch.tensor(mask, dtype=torch.bool)
    zeros = torch.zeros(mask.shape)
    return Rollout(torch.tensor(tokens) if tokens else zeros.long(), torch.ones(len(mask), dtype=torch.long), mask, zeros,
                   torch.tensor(entropy) if entropy else zeros, zeros, torch.tensor(finished or [True] * len(mask)))


def test_describe_counts_what_is_there():
    r = rollout_of([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], [[9, 5, 5, 9], [9, 5, 6, 7], [9, 5, 9, 9], [9, 4, 4, 9]],
                   [True, False, True, True], [[9.0, 1, 2, 9], [9, 1, 1, 1], [9, 0, 9, 9], [9, 1, 1, 9]])
    d = r.describe(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert d == pytest.approx({"reward": 0.25, "pass_rate": 0.5, "dead_groups": 0.5, "truncated": 0.25, "length": 2.0,
                               "length_right": 2.0, "length_wrong": 2.0, "entropy": 1.0, "commonest": 0.5})
    assert math.isnan(r.describe(torch.ones(2, 2))["length_wrong"])


def test_describe_kept():
    c = SimpleNamespace(keep=0.5, scope="batch", group_size=2, clip_low=0.2, clip_high=0.2, beta=0.1)
    r = rollout_of([[0, 1, 1], [0, 1, 1]])
    entropy = torch.tensor([[0, 0.1, 0.2], [0, 0.3, 0.4]])
    kept = torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    logprobs = torch.tensor([[0, math.log(1.5), 0], [0, math.log(1.5), 0]])      # A > 0: clipped; A < 0: not
    d = r.describe_kept(kept, torch.tensor([True, False]), logprobs, entropy, torch.tensor([1.0, -1.0]), logprobs, c)
    assert d == pytest.approx({"entropy_kept": 0.25, "kept_share": 0.5, "overlap_entropy": 0.5, "kept_right": 0.5,
                               "clip_share": 0.25, "largest": 0.5, "kl": 0.0})
    ref = torch.where(r.answer_mask, math.log(0.25), 0.0)
    pi = torch.where(r.answer_mask, math.log(0.5), 0.0)
    d = r.describe_kept(kept & False, torch.tensor([True, False]), pi, entropy, torch.zeros(2), ref, c)
    assert d["kl"] == pytest.approx(0.1931, abs=1e-4) and d["kept_share"] == 0 and d["clip_share"] == 0


@pytest.mark.parametrize("n, right, k, expected", [(8, 0, 1, 0), (8, 8, 8, 1), (8, 2, 1, 0.25), (4, 1, 2, 0.5),
                                                   (10, 3, 4, 1 - 35 / 210), (5, 3, 3, 1), (16, 1, 16, 1), (3, 0, 3, 0)])
def test_pass_at_k(n, right, k, expected):
    assert pass_at_k(n, right, k) == pytest.approx(expected)


def test_pass_at_k_is_the_mean_over_all_choices():
    from itertools import combinations
    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                chosen = list(combinations([1] * right + [0] * (n - right), k))
                assert pass_at_k(n, right, k) == pytest.approx(sum(map(max, chosen)) / len(chosen))


@pytest.mark.parametrize("n, k", [(7, 8), (1, 2)])
def test_pass_at_k_beyond_the_samples_is_an_error(n, k):
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples, not {n}"):
        pass_at_k(n, n, k)


# -------------------------------------------------------------------------------------------------------- the demonstration

@pytest.mark.parametrize("arguments", [[], ["no-such-run"]])
def test_the_demonstration_refuses_a_folder_without_a_run(arguments, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "rollout.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and done.stderr.startswith("usage: python rollout.py RUN") and done.stderr.count("\n") == 1
