"""gmts.py against closed forms, autograd, float64 and slow obvious references."""
import math
import random
from types import SimpleNamespace

import pytest
import torch

from gmts import (bootstrap, group_advantages, learning_coefficient, loss_weights, norm_correlation,
                  parameter_grad_norms, policy_loss, policy_objective, report, select_tokens, spearman, token_scores,
                  token_stats, update_cosines)
from model import GPT, SIZES, GPTConfig, byte_tokenizer
from rollout import generate

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def one_thread(request):
    """Small tensors gain nothing from threads, and wait long for each other where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "slow" in request.keywords else 1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------- group_advantages

@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("value, G", [(0.1, 8), (0.0, 4), (1.0, 16), (0.7, 6), (1 / 3, 7)])
def test_dead_group_is_exactly_zero(value, G, scale):
    assert (group_advantages(torch.full((3, G), value), scale) == 0).all()


@pytest.mark.parametrize("right, G", [(1, 8), (4, 8), (7, 8), (3, 16), (1, 2)])
def test_advantages_closed_form(right, G):
    p = right / G
    rewards = torch.tensor([[1.0] * right + [0.0] * (G - right)])
    A = group_advantages(rewards)
    expected = [math.sqrt((1 - p) / p)] * right + [-math.sqrt(p / (1 - p))] * (G - right)
    torch.testing.assert_close(A[0], torch.tensor(expected))
    torch.testing.assert_close(group_advantages(rewards, scale=False), rewards - p)
    assert A.sum().abs() < 1e-5 and abs(A.square().mean() - 1) < 1e-5


def test_groups_are_independent_and_types_accepted():
    rewards = torch.tensor([[True, False, False], [True, True, True]])
    assert torch.equal(group_advantages(rewards), group_advantages(rewards.double()))
    assert (group_advantages(rewards)[1] == 0).all()


@pytest.mark.parametrize("shape", [(4, 1), (4,), (2, 3, 4), (4, 0)])
def test_group_of_one_is_an_error(shape):
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.zeros(shape))


# --------------------------------------------------------------------------------------------------------- token_stats

def stats64(logits, targets):
    """The textbook formulas in float64, with 1 - p_y summed from the other probabilities, lest float64 cancel too."""
    z = logits.double()
    z = z - z.amax(-1, keepdim=True)
    certain = torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).bool()
    logp = z - torch.log1p(torch.where(certain, 0.0, z.exp()).sum(-1, keepdim=True))
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
    target = torch.nn.functional.one_hot(targets, z.shape[-1]).bool()
    others = torch.where(target, 0.0, p)
    return logp[target], entropy, (others.square().sum(-1) + others.sum(-1).square()).sqrt()


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 30.0, 300.0])
def test_token_stats_against_float64(spread):
    logits, targets = torch.randn(500, 37) * spread, torch.randint(37, (500,))
    for ours, exact in zip(token_stats(logits, targets), stats64(logits, targets)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("gap", [3, 8, 12, 15, 17, 20, 30, 40])
def test_token_stats_of_a_nearly_certain_policy(gap):
    """The tail below 6e-8, which 1 + tail rounds off, still gives every number to five digits."""
    logits = torch.full((2, 50), -float(gap))
    logits[:, 7] = 0.0
    logits = logits + 11.0
    targets = torch.tensor([7, 8])                                # the certain token, and a rare one
    for ours, exact in zip(token_stats(logits, targets), stats64(logits, targets)):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


def test_uniform_and_masked_logits():
    logprob, entropy, norm = token_stats(torch.tensor([[0.0, 0.0, -INF], [5.0, -INF, -INF]]), torch.tensor([1, 0]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2), 0.0]))
    torch.testing.assert_close(logprob, torch.tensor([-math.log(2), 0.0]))
    torch.testing.assert_close(norm, torch.tensor([math.sqrt(0.5), 0.0]))


@pytest.mark.parametrize("row", [[0.0, 0.0, -INF], [3.0, -1.0, -INF, -INF, 2.0], [-INF, 1e4, 0.0], [1.0, 1.0, 1.0]])
def test_entropy_and_logprob_gradient_against_autograd(row):
    logits = torch.tensor([row], requires_grad=True)
    live = logits.detach()[0].isfinite()
    y = int(live.nonzero()[0])
    reference = logits.detach()[:, live].double().requires_grad_()
    logp = reference.log_softmax(-1)
    for index, exact in enumerate([logp[0, 0], -(logp.exp() * logp).sum()]):            # logprob, entropy
        grad, = torch.autograd.grad(token_stats(logits, torch.tensor([y]))[index].sum(), logits)
        assert grad.isfinite().all() and (grad[:, ~live] == 0).all()
        expected, = torch.autograd.grad(exact, reference, retain_graph=True)
        torch.testing.assert_close(grad[:, live].double(), expected, atol=1e-6, rtol=1e-5)


def test_logit_grad_norm_against_autograd():
    logits = (torch.randn(60, 23) * 4).requires_grad_()
    targets = torch.randint(23, (60,))
    logprob, _, norm = token_stats(logits, targets)
    grad, = torch.autograd.grad(logprob.sum(), logits)
    torch.testing.assert_close(norm, grad.norm(dim=-1), atol=1e-6, rtol=1e-5)
    _, _, mean_square = token_stats(logits[:1].expand(23, -1), torch.arange(23))
    p = logits[0].softmax(-1)
    torch.testing.assert_close((p * mean_square ** 2).sum(), 1 - p.square().sum())   # the Gini impurity


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_are_read_in_fp32(dtype):
    logits, targets = torch.randn(20, 300).to(dtype), torch.randint(300, (20,))
    for half, full in zip(token_stats(logits, targets), token_stats(logits.float(), targets)):
        assert torch.equal(half, full)


def test_entropy_is_never_negative():
    for scale in (1e-3, 1.0, 100.0, 1e4):
        assert (token_stats(torch.randn(2000, 11) * scale, torch.zeros(2000, dtype=torch.long))[1] >= 0).all()


def test_nan_and_infinite_logits_show():
    assert token_stats(torch.tensor([[NAN, 0.0], [INF, 0.0], [-INF, -INF]]), torch.tensor([1, 1, 1]))[1].isnan().all()


# ----------------------------------------------------------------------- omega and the objective, one against the other

def test_clip_indicator_table():
    ratio = torch.tensor([[1.5], [1.5], [0.5], [0.5], [1.1], [0.9]])
    A = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    omega = learning_coefficient(ratio.log(), torch.zeros(6, 1), A, 0.2, 0.2)
    torch.testing.assert_close(omega[:, 0], torch.tensor([0.0, -3.0, 1.0, 0.0, 2.2, -1.8]))


def test_clip_higher_moves_only_the_upper_bound():
    logprobs = torch.tensor([[1.25], [0.75]]).log()
    A = torch.tensor([1.0, -1.0])
    assert learning_coefficient(logprobs, torch.zeros(2, 1), A, 0.2, 0.28).tolist()[0][0] == pytest.approx(1.25)
    assert learning_coefficient(logprobs, torch.zeros(2, 1), A, 0.3, 0.28).tolist()[1][0] == pytest.approx(-0.75)
    assert learning_coefficient(logprobs, torch.zeros(2, 1), A, 0.2, 0.2).abs().sum() == 0


@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
def test_omega_is_the_gradient_of_the_objective(beta):
    """On both sides of the clip, at r exactly 1, at A = 0, and beyond the clamp of either log-ratio."""
    old = torch.randn(6, 400).double() - 3
    shift = torch.randn(6, 400).double() * 0.4
    shift[:, :40] = 0.0
    shift[:, 40:44] = torch.tensor([25.0, -25.0, 20.0, -20.0])
    logprobs = (old + shift).requires_grad_()
    ref = (old + torch.randn(6, 400).double()).requires_grad_()
    with torch.no_grad():
        ref[:, 44:48] = logprobs[:, 44:48] + torch.tensor([30.0, -30.0, 19.9, -19.9])
    A = torch.tensor([1.3, -1.3, 0.2, -2.6, 0.0, 1.0]).double()
    objective = policy_objective(logprobs, old, A, 0.2, 0.28, ref, beta)
    grad, = torch.autograd.grad(objective.sum(), logprobs)
    omega = learning_coefficient(logprobs, old, A, 0.2, 0.28, ref, beta)
    assert not omega.requires_grad and objective.isfinite().all()
    torch.testing.assert_close(omega, grad)
    if not beta:
        assert torch.equal(omega[:, :40], A[:, None].expand(-1, 40))                    # r = 1: omega is A
        assert (omega == 0).any() and (omega[4] == 0).all()


def test_omega_at_the_very_bounds_of_the_clip():
    one, A = torch.zeros(2, 1), torch.tensor([1.0, -1.0])
    logprobs = torch.tensor([[1.5], [0.5]]).log().requires_grad_()                      # bounds that fp32 holds exactly
    grad, = torch.autograd.grad(policy_objective(logprobs, one, A, 0.5, 0.5).sum(), logprobs)
    torch.testing.assert_close(learning_coefficient(logprobs, one, A, 0.5, 0.5), grad)


def test_kl_values_and_frozen_reference():
    pi, ref, zero = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log(), torch.zeros(1)
    k3 = -policy_objective(pi, pi, zero, 0.2, 0.2, ref, 1.0)
    swapped = -policy_objective(ref, ref, zero, 0.2, 0.2, pi, 1.0)
    torch.testing.assert_close(torch.cat([k3, swapped], dim=1), torch.tensor([[math.log(2) - 0.5, 1 - math.log(2)]]))
    leaves = [torch.randn(2, 5).requires_grad_() for _ in range(3)]
    policy_objective(leaves[0], leaves[1], torch.ones(2), 0.2, 0.2, leaves[2], 0.1).sum().backward()
    assert leaves[0].grad.abs().sum() > 0 and leaves[1].grad is None and leaves[2].grad is None


def test_far_log_ratios_stay_finite():
    logprobs = torch.tensor([[-1.0, -200.0, -1e-8, -900.0]]).requires_grad_()
    old, ref = torch.tensor([[-500.0, -1.0, -800.0, 0.0]]), torch.tensor([[-700.0, -0.1, -300.0, -1.0]])
    for A in (1.0, -1.0):
        objective = policy_objective(logprobs, old, torch.tensor([A]), 0.2, 0.28, ref, 0.1)
        grad, = torch.autograd.grad(objective.sum(), logprobs)
        assert objective.isfinite().all() and grad.isfinite().all()
        assert torch.equal(grad, learning_coefficient(logprobs, old, torch.tensor([A]), 0.2, 0.28, ref, 0.1))


def test_policy_gradient_is_that_of_the_kept_tokens_alone():
    logits, targets = torch.randn(3, 6, 9).double().requires_grad_(), torch.randint(9, (3, 6))
    mask = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    A, kept = torch.tensor([0.5, -1.5, 1.0]).double(), (torch.rand(3, 6) < 0.5) & mask
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss = policy_loss(policy_objective(logprobs, logprobs.detach(), A, 0.2, 0.28), kept, mask)
    grad, = torch.autograd.grad(loss, logits)
    expected = torch.zeros_like(logits)
    for b, t in kept.nonzero().tolist():                          # by hand: -A (onehot - p) / kept tokens
        onehot = torch.nn.functional.one_hot(targets[b, t], 9)
        expected[b, t] = -A[b] * (onehot - logits[b, t].softmax(-1)) / kept.sum()
    torch.testing.assert_close(grad, expected.detach())


# -------------------------------------------------------------------------------------------------------- token_scores

def test_scores_of_each_selection():
    entropy, omega, norm = torch.tensor([[0.5, 2.0]]), torch.tensor([[-3.0, 0.25]]), torch.tensor([[1.2, 0.4]])
    assert token_scores("all", entropy, omega).tolist() == [[1.0, 1.0]]
    assert token_scores("entropy", entropy, omega).tolist() == [[0.5, 2.0]]
    assert token_scores("gmts", entropy, omega).tolist() == [[1.5, 0.5]]
    torch.testing.assert_close(token_scores("exact", entropy, omega, norm), torch.tensor([[3.6, 0.1]]))
    assert not token_scores("gmts", entropy.requires_grad_(), omega).requires_grad


def test_unknown_selection_names_the_allowed_ones():
    with pytest.raises(ValueError, match="random, all, entropy, gmts, exact, not 'entrpy'"):
        token_scores("entrpy", torch.ones(1, 1), torch.ones(1, 1))


def test_random_draws_from_its_generator_only():
    entropy = torch.rand(4, 50)
    state = torch.get_rng_state()
    first, again = (token_scores("random", entropy, entropy, generator=torch.Generator().manual_seed(5)) for _ in "ab")
    assert torch.equal(first, again) and torch.equal(state, torch.get_rng_state())
    other = token_scores("random", entropy, entropy, generator=torch.Generator().manual_seed(6))
    assert not torch.equal(first, other) and (first > 0).all() and (first <= 1).all()


# ------------------------------------------------------------------------------------------------------- select_tokens

def slow_select(scores, mask, keep, rows, bottom):
    """Obvious reference: sort (score, index) pairs of each scope in plain Python."""
    B, T = scores.shape
    kept = [[False] * T for _ in range(B)]
    for start in range(0, B, rows):
        live = [(b, t) for b in range(start, start + rows) for t in range(T) if mask[b, t]]
        values = [(b, t, float(scores[b, t])) for b, t in live]
        values = [v for v in values if not math.isnan(v[2]) and (bottom or v[2] > 0)]
        values.sort(key=lambda v: (v[2] if bottom else -v[2], v[0], v[1]))
        k = max(math.floor(keep * len(live) + 1e-9), 1) if live else 0
        for b, t, _ in values[:k]:
            kept[b][t] = True
    return torch.tensor(kept, dtype=torch.bool).reshape(B, T)


def test_select_against_slow_reference():
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    for trial in range(4000):
        G = rng.choice([1, 2, 3])
        B, T = G * rng.choice([1, 2, 3]), rng.randint(1, 9)
        scores = torch.randn(B, T, generator=generator) if rng.random() < 0.5 else \
            torch.randint(-1, 4, (B, T), generator=generator).float()                   # many ties, zeros, negatives
        for special in (NAN, INF, -INF, 0.0, -0.0):
            if rng.random() < 0.3:
                scores[torch.rand(B, T, generator=generator) < 0.2] = special
        if rng.random() < 0.15:
            scores = scores.to(rng.choice([torch.float16, torch.bfloat16, torch.float64]))
        mask = torch.rand(B, T, generator=generator) < rng.choice([0.0, 0.3, 0.8, 1.0])
        keep = rng.choice([0.01, 0.1, 0.2, 0.29, 0.5, 0.57, 0.8, 0.9, 1.0, 1])
        scope, bottom = rng.choice(["batch", "group", "answer"]), rng.random() < 0.4
        rows = {"batch": B, "group": G, "answer": 1}[scope]
        kept = select_tokens(scores, mask, keep, scope, G, bottom)
        expected = slow_select(scores, mask, keep, rows, bottom)
        assert torch.equal(kept, expected), (trial, scores, mask, keep, scope, bottom)


def count_kept(scores, mask=None, **options):
    scores = torch.as_tensor(scores)[None]
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else torch.as_tensor(mask)[None]
    return int(select_tokens(scores, mask, **options).sum())


def test_select_counts():
    assert count_kept([0.9, 0.8] + [0.0] * 18) == 2
    assert count_kept([0.9] + [0.0] * 18) == 1                    # fewer score above 0 than may be kept
    assert count_kept([0.5] * 100, keep=0.07) == 7
    assert count_kept([0.5] * 100, keep=0.29) == 29
    assert count_kept([0.5, 0.4, 0.3], keep=0.2) == 1             # at least one
    assert count_kept([NAN] * 5) == count_kept([0.0] * 5) == count_kept([NAN] * 5, bottom=True) == 0
    assert count_kept([0.0] * 10, bottom=True) == 2


def test_padding_never_enters():
    scores = torch.tensor([0.1 * i for i in range(1, 11)] + [9.0] * 40)                 # pads score high
    kept = select_tokens(scores[None], torch.arange(50)[None] < 10, keep=0.2)
    assert kept.nonzero()[:, 1].tolist() == [8, 9]


def test_ties_go_to_the_lowest_index():
    kept = select_tokens(torch.full((3, 4), 0.7), torch.ones(3, 4, dtype=torch.bool), keep=0.5)
    assert kept.flatten().nonzero()[:, 0].tolist() == list(range(6))


@pytest.mark.parametrize("scope", ["batch", "group", "answer"])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_select_from_nothing(shape, scope):
    nothing = torch.zeros(shape, dtype=torch.bool)
    assert select_tokens(torch.zeros(shape), nothing, scope=scope, group_size=2).shape == shape


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"keep": -0.2}, {"keep": NAN}, {"scope": "token"},
                                     {"scope": "group"}, {"scope": "group", "group_size": 3}])
def test_select_refuses(options):
    with pytest.raises(ValueError):
        select_tokens(torch.rand(4, 5), torch.ones(4, 5, dtype=torch.bool), **options)


@pytest.mark.parametrize("scope", ["batch", "group", "answer"])
def test_selection_does_not_depend_on_row_order(scope):
    """Whole groups may move; with distinct scores the same tokens are kept."""
    scores, mask = torch.rand(6, 20), torch.rand(6, 20) < 0.8
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    kept = select_tokens(scores, mask, 0.3, scope, 2)
    assert torch.equal(kept[order], select_tokens(scores[order], mask[order], 0.3, scope, 2))


def test_gmts_is_entropy_inside_one_answer():
    entropy, mask = torch.rand(8, 60), torch.arange(60) < torch.randint(1, 61, (8, 1))
    A = group_advantages(torch.tensor([[1.0, 1, 0, 0, 0, 0, 1, 0]]))[0]
    omega = learning_coefficient(entropy, entropy, A, 0.2, 0.28)  # r = 1
    gmts, ets = token_scores("gmts", entropy, omega), token_scores("entropy", entropy, omega)
    assert torch.equal(select_tokens(gmts, mask, scope="answer"), select_tokens(ets, mask, scope="answer"))
    by_batch = select_tokens(gmts, mask)
    assert not torch.equal(by_batch, select_tokens(ets, mask))    # across answers they differ: |A| moves the slots
    assert by_batch[A > 0].sum() / mask[A > 0].sum() > by_batch[A < 0].sum() / mask[A < 0].sum()


def test_dead_group_gets_no_slot():
    entropy = torch.rand(4, 10)
    A = group_advantages(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).flatten()
    kept = select_tokens(token_scores("gmts", entropy, A[:, None].expand(4, 10)), torch.ones(4, 10, dtype=torch.bool))
    assert kept[:2].sum() == 0 and kept[2:].sum() == 8            # floor(0.2 * 40): the dead ones count


def test_select_more_than_two_to_the_24():
    n = 2 ** 24 + 1000
    scores = torch.ones(1, n, dtype=torch.bfloat16)
    scores[0, 5] = 2.0
    kept = select_tokens(scores, torch.ones(1, n, dtype=torch.bool), keep=0.25)
    assert kept.sum() == n // 4 and kept[0, :n // 4].all()


def test_select_of_a_million_tokens():
    scores = torch.rand(1000, 1000)
    kept = select_tokens(scores, torch.ones(1000, 1000, dtype=torch.bool))
    assert kept.sum() == 200_000 and scores[kept].min() >= scores[~kept].max()      # bench.py has the speed


# ------------------------------------------------------------------------------------------------------------- the loss

def test_divisors():
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    kept = mask & (torch.arange(5) < 1)
    assert loss_weights(kept, mask)[:, 0].tolist() == [0.5, 0.5, 0.0]
    torch.testing.assert_close(loss_weights(kept, mask, "live")[:, 0], torch.tensor([1 / 7, 1 / 7, 0]))
    torch.testing.assert_close(loss_weights(kept, mask, "answer")[:, 0], torch.tensor([1 / 15, 1 / 6, 0]))
    torch.testing.assert_close(loss_weights(kept, mask, "constant", 8)[:, 0], torch.tensor([1 / 24, 1 / 24, 0]))
    assert (loss_weights(mask & False, mask) == 0).all()          # nothing kept: no division by 0
    objective = torch.tensor([[2.0, NAN, 1, 1, 1], [4.0, 1, 1, 1, 1], [NAN, 1, 1, 1, 1]])
    assert policy_loss(objective, kept, mask).item() == -3.0      # what is not kept never enters


@pytest.mark.parametrize("divisor", ["kept", "live", "answer", "constant"])
def test_gradient_does_not_depend_on_micro_batches_or_row_order(divisor):
    old, A = torch.randn(6, 10).double(), torch.randn(6).double()
    logprobs = (old + 0.2 * torch.randn(6, 10)).requires_grad_()
    mask = torch.arange(10) < torch.tensor([10, 3, 7, 1, 9, 0])[:, None]
    kept = mask & (torch.rand(6, 10) < 0.5)
    whole = policy_loss(policy_objective(logprobs, old, A, 0.2, 0.28), kept, mask, divisor, 12)
    expected, = torch.autograd.grad(whole, logprobs)
    weights = loss_weights(kept, mask, divisor, 12)
    order = torch.randperm(6)
    for size in (1, 2, 4, 6):
        total = torch.zeros_like(old)
        for rows in order.split(size):
            loss = -(weights[rows] * policy_objective(logprobs[rows], old[rows], A[rows], 0.2, 0.28)).sum()
            total += torch.autograd.grad(loss, logprobs)[0]
        torch.testing.assert_close(total, expected)


# ----------------------------------------------------------------------------------------- the gradient, exactly

SMALL = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8, vocab_size=30, embedding_rows=32)
KINDS = {"tied": {}, "untied": {"tie_word_embeddings": False}, "bias": {"attention_bias": True},
         "qk_norm": {"qk_norm": True, "num_hidden_layers": 3}}


def batch_of(kind="tied"):
    """A small GPT, tokens (5, 17) of few distinct ids, and a ragged mask of answers."""
    model = GPT(GPTConfig(**SMALL | KINDS[kind]))
    for p in model.parameters():                                  # norms and biases away from 1 and 0
        p.data += 0.3 * torch.randn_like(p)
    start, end = torch.tensor([3, 5, 1, 9, 4])[:, None], torch.tensor([17, 9, 4, 10, 16])[:, None]
    place = torch.arange(17)
    return model, torch.randint(8, (5, 17)), (place >= start) & (place < end)


def one_by_one(model, tokens, chosen, temperature=1.0):
    """The obvious reference: one backward pass per chosen token, all gradients in one vector: {(b, t): gradient}."""
    gradients = {}
    for b, t in chosen.nonzero().tolist():
        logits = model.logits(model(tokens[b:b + 1, :t])[0, -1]) / temperature
        grads = torch.autograd.grad(logits.log_softmax(-1)[tokens[b, t]], list(model.parameters()))
        gradients[b, t] = torch.cat([g.flatten() for g in grads])
    return gradients


@pytest.mark.parametrize("kind, temperature", [("tied", 1.0), ("tied", 0.7), ("untied", 0.7), ("bias", 1.3),
                                               ("qk_norm", 1.0)])
def test_parameter_grad_norms_against_one_backward_each(kind, temperature):
    model, tokens, chosen = batch_of(kind)
    expected = torch.zeros(tokens.shape)
    for place, gradient in one_by_one(model, tokens, chosen, temperature).items():
        expected[place] = gradient.norm()
    for copies in (1, 4, 1000):
        norms = parameter_grad_norms(model, tokens, chosen, temperature=temperature, copies=copies)
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-6)
    omega = torch.randn(tokens.shape)
    weighted = parameter_grad_norms(model, tokens, chosen, omega, temperature)
    torch.testing.assert_close(weighted, expected * omega.abs(), rtol=1e-4, atol=1e-6)


def test_the_logit_grad_norm_times_the_hidden_norm_is_the_output_layer_s_share():
    """Of the gradient over all parameters: || onehot - p || times || hidden ||."""
    model, tokens, chosen = batch_of("untied")
    with torch.no_grad():
        hidden = model(tokens)[:, :-1]
        norm = token_stats(model.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten())[2].view(5, 16)
        whole = parameter_grad_norms(model, tokens, chosen)
    head = torch.nn.functional.pad(norm * hidden.norm(dim=-1), (1, 0)) * chosen
    for place, gradient in one_by_one(model, tokens, chosen).items():
        torch.testing.assert_close(head[place], gradient[-model.lm_head.weight.numel():].norm(), rtol=1e-4, atol=1e-6)
    assert (whole[chosen] > head[chosen]).all()


def test_parameter_grad_norms_leaves_no_trace():
    model, tokens, chosen = batch_of()
    before = model(tokens)
    with torch.no_grad():                                         # works there too
        assert parameter_grad_norms(model, tokens, chosen & False).sum() == 0
        parameter_grad_norms(model, tokens, chosen)
    assert torch.equal(before, model(tokens)) and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="nothing stands before it"):
        parameter_grad_norms(model, tokens, torch.ones_like(chosen))


def test_update_cosines_against_one_backward_each():
    model, tokens, live = batch_of()
    omega = torch.randn(5, 1).expand(5, 17)
    kept = {"some": live & (torch.rand(5, 17) < 0.4), "all": live}
    gradients = one_by_one(model, tokens, live)
    updates = {name: sum(omega[place] * g for place, g in gradients.items() if mask[place])
               for name, mask in kept.items()}
    cosines = update_cosines(model, tokens, live, omega, kept)
    assert cosines["all"] == pytest.approx(1.0, abs=1e-12)
    expected = torch.cosine_similarity(updates["some"], updates["all"], dim=0)
    assert cosines["some"] == pytest.approx(float(expected), abs=1e-4)


# ----------------------------------------------------------------------------------------------------- the statistics

@pytest.mark.parametrize("x, y, scipy", [
    ([0.3, 1.2, -0.5, 2.2, 0.9, 3.1], [1.0, 0.5, -2.0, 3.0, 2.5, 2.8], 0.7714285714285715),
    ([1, 2, 2, 3, 3, 3, 4], [2, 1, 3, 3, 5, 3, 4], 0.757317246446102),
    ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], -1.0),
    ([7, 7, 1, 0], [0.1, 0.4, 0.2, 0.3], -0.10540925533894598),
])
def test_spearman_against_scipy(x, y, scipy):
    x, y = torch.tensor(x, dtype=torch.float), torch.tensor(y, dtype=torch.float)
    assert spearman(x, y) == pytest.approx(scipy, abs=1e-9)
    assert spearman(x.exp(), 3 * y - 1) == pytest.approx(scipy, abs=1e-9)               # ranks alone count
    assert math.isnan(spearman(x, torch.ones(len(x))))


def test_bootstrap_interval_of_a_mean():
    units = torch.randn(400).tolist()
    value, low, high = bootstrap(units, lambda drawn: sum(drawn) / len(drawn))
    assert low < value < high and 0.15 < high - low < 0.25        # 2 * 1.96 / sqrt(400) = 0.196
    assert bootstrap([3.0], sum) == (3.0, 3.0, 3.0)
    assert bootstrap(units, sum) == bootstrap(units, sum)


def test_norm_correlation_within_and_across():
    """Entropy orders perfectly inside each answer and not at all across; times |A| it does both."""
    entropy, chosen = torch.rand(12, 30), torch.rand(12, 30) < 0.8
    A = torch.tensor([2.0, 0.1, 0.1] * 4)[:, None]
    norms = entropy * A
    assert norm_correlation(entropy, norms, chosen)[0] == pytest.approx(1.0)
    value, low, high = norm_correlation(entropy, norms, chosen, 3)
    assert low <= value <= high and value < 0.8
    assert norm_correlation(entropy * A, norms, chosen, 3) == pytest.approx((1.0, 1.0, 1.0))
    for group_size in (3, None):
        assert all(map(math.isnan, norm_correlation(entropy, norms, chosen & False, group_size)))


def toy_run(rewards):
    """What `report` needs of a train.Run, around an untrained model."""
    model, tokenizer, G = GPT(GPTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1)), byte_tokenizer(), 4

    def grade(problems, samples, temperature, generator):
        rollout = generate(model, [[65, 66]] * len(problems), samples, 12, [256], temperature, generator=generator)
        return rollout, [], torch.tensor(rewards)

    return SimpleNamespace(config=SimpleNamespace(loss="grpo", prompts=2, group_size=G, temperature=0.8), model=model, grade=grade,
                           tokenizer=tokenizer, device=torch.device("cpu"), next_problems=lambda n: [None] * n)


def test_report_prints_what_each_selection_keeps(capsys):
    report(toy_run([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    printed = capsys.readouterr().out
    lines = printed.split("\n")
    assert "1 of 2 groups dead" in printed and "reward 1, advantage +1.73" in printed
    assert [line[:6] for line in lines if line.startswith("exact")] == ["exact ", "exact,", "exact "]
    assert [line.split()[2] for line in lines if line.startswith(("gmts  ", "exact  "))][-2:] == ["0.00", "0.00"]


def test_report_of_nothing_but_dead_groups(capsys):
    report(toy_run([[1.0] * 4, [0.0] * 4]))
    assert "2 of 2 groups dead" in capsys.readouterr().out
