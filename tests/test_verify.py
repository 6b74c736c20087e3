"""The problems against independent solvers, the verifier against tables of real and hostile answers, the reader."""
import ast
import contextlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

import verify
from verify import DOMAINS, LEVELS, Problem, answers_match, extract_answer, load_problems, make_problems, reward

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
EACH = [(domain, level) for domain in DOMAINS for level in LEVELS]


# --- Independent solvers, which read nothing but the question ---

def arithmetic(node):
    if isinstance(node, ast.BinOp):
        left, right = arithmetic(node.left), arithmetic(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    return node.value


def symbols_of(question):
    """A math question told in words, as the expression told in symbols."""
    if question.endswith("=?"):
        return question[:-2]
    start, *changes = question.removesuffix(". How many?").split(", ")
    text = re.fullmatch(r"[A-Z][a-z]+ has (\d+) [a-z]+", start)[1]
    for place, change in enumerate(changes):
        verb, operand = change.split()
        sign = {"finds": "+", "gets": "+", "buys": "+", "loses": "-", "gives": "-", "sells": "-", "doubles": "*"}[verb]
        text = (f"({text})" if place else text) + sign + ("2" if sign == "*" else operand)
    return text


class Assigned(dict):
    """A program's variables, with all that was ever assigned to them, in order."""

    def __init__(self):
        super().__init__()
        self.history = []

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        if name == "a":
            self.history.append(value)


def run_program(question):
    printed, variables = io.StringIO(), Assigned()
    with contextlib.redirect_stdout(printed):
        exec(question, {}, variables)  # our own program, in a test only
    return printed.getvalue().strip(), variables.history


NAME, MOVE = "[A-Z][a-z]", "(?:[1-4]{2}|<<|>>)"
ROW = re.compile(rf"({NAME}(?: {NAME}){{3}}): ({MOVE}(?: {MOVE})*)\. (1st|2nd|3rd|4th)\?"
                 rf"(?: A ({NAME}) B ({NAME}) C ({NAME}))?")


def row_of(question):
    """A logic question's parts: row, moves, place asked for, choices (None where it asks for the name)."""
    row, moves, place, *choices = ROW.fullmatch(question).groups()
    return row.split(), moves.split(), int(place[0]), choices if choices[0] else None


def who_stands(row, moves, place):
    """Back from a place after all moves to where its person stood at first: no row is ever moved here."""
    for move in reversed(moves):
        if move in ("<<", ">>"):
            place = (place if move == "<<" else place + 2) % 4 + 1
        elif str(place) in move:
            place = int(move.replace(str(place), ""))
    return row[place - 1]


def solve(domain, question):
    if domain == "math":
        return str(arithmetic(ast.parse(symbols_of(question), mode="eval").body))
    if domain == "code":
        return run_program(question)[0]
    row, moves, place, choices = row_of(question)
    name = who_stands(row, moves, place)
    return "ABC"[choices.index(name)] if choices else name


def full_steps(domain, question):
    """All steps of a question, as a worked solution writes them."""
    if domain == "code":
        values = iter(run_program(question)[1])     # what Python itself assigns, one after the other
        now = next(values)
        steps = [str(now)]
        for line in question.split("\n")[1:-1]:
            head, statement = line.rsplit(":", 1) if ":" in line else ("", line)
            change = statement.removeprefix("a=a")
            if head.startswith("if") and not eval(head[3:], {"a": now}):
                steps.append(f"{now}{head[4:]} no")
                continue
            for turn in range(int(head[-2]) if head.startswith("for") else 1):
                lead = f"i={turn} " if head.startswith("for") else f"{now}{head[4:]} " if head else ""
                now = next(values)
                steps.append(f"{lead}{change}={now}")
        return steps
    if domain == "math":
        start, *changes = re.findall(r"[-+*]?\d+", symbols_of(question))
        inside = range(1, len(changes) + 1)
        texts = ["(" * number + start + ")".join(["", *changes[:number]]) for number in inside]  # ((7)+5)-3
        totals = [arithmetic(ast.parse(text, mode="eval").body) for text in texts]
        steps = [f"{change}={total}" for change, total in zip(changes, totals)]
        return [start + steps[0]] + steps[1:]
    row, moves, _, _ = row_of(question)
    return ["".join(name[0] for name in row)] + [
        f"{move} " + "".join(who_stands(row, moves[:number], place)[0] for place in (1, 2, 3, 4))
        for number, move in enumerate(moves, start=1)]


def identity(domain, question):
    """A problem seen from outside, whatever its telling."""
    if domain == "math":
        return symbols_of(question)
    return question if domain == "code" else question.split("?")[0]


def chain(domain, question):
    """What the split must depend on: a problem's steps, which the four questions about a row of people share."""
    return identity(domain, question).split(". ")[0]


# --- Problems ---

@pytest.mark.parametrize("domain,level", EACH)
def test_gold_steps_and_styles(domain, level):
    problems = make_problems(domain, level, 150, seed=3)
    styles = {"full": 0, "short": 0, "boxed": 0}
    for question, solution, answer in problems:
        assert solve(domain, question) == answer
        assert reward(solution, answer) == 1.0
        assert extract_answer(solution) == answer
        wrong = str(int(answer) + 1) if answer.isdigit() else {"A": "B"}.get(answer, "A" if len(answer) == 1 else "Bob")
        assert reward(solution, wrong) == 0.0
        assert reward(solution.replace("####", "so"), answer) == float("boxed" in solution)
        assert (question + solution).isascii()
        work = re.split(r" (?:####|\\boxed)", solution)[0]
        steps = full_steps(domain, question)
        full = work == " ".join(steps)
        assert len(steps) == level + (domain != "math")     # code and logic first write down where they start
        assert full or work == " ".join(re.split("[=> ]", step)[-1] for step in steps)
        if domain == "logic":
            assert len({name[0] for name in row_of(question)[0]}) == 4  # initials tell a row's people apart
        else:
            values = re.findall(r"[-+*]\d=(\d+)", " ".join(steps))
            assert all(0 <= int(value) <= verify.TOP for value in values)
            assert len(values) + " ".join(steps).count(" no") == level
        assert full or "boxed" not in solution
        styles["boxed" if "boxed" in solution else "full" if full else "short"] += 1
    assert styles["full"] > 0.65 * len(problems)
    assert styles["boxed"] > 0.03 * len(problems) and styles["short"] > 0.03 * len(problems)


@pytest.mark.parametrize("domain", DOMAINS)
def test_questions_are_short_enough_for_a_byte_model(domain):
    problems = make_problems(domain, 6, 500, seed=0)
    assert sum(len(p.question) for p in problems) / 500 <= 90
    assert sum(len(p.solution) for p in problems) / 500 <= 72


@pytest.mark.parametrize("domain", DOMAINS)
def test_split_is_disjoint_whatever_seed_level_and_telling(domain):
    train, held_out = set(), set()
    for level in LEVELS:
        for seed in range(3):
            size = 40 if (domain, level) == ("math", 1) else 150
            train |= {chain(domain, p.question) for p in make_problems(domain, level, size, seed)}
            held_out |= {chain(domain, p.question) for p in make_problems(domain, level, size, seed, held_out=True)}
    assert len(train) > 1000 and len(held_out) > 1000
    assert not train & held_out


@pytest.mark.parametrize("domain,level", EACH)
def test_problems_are_distinct_and_a_prefix_of_more(domain, level):
    many = make_problems(domain, level, 300, seed=5)
    assert len({identity(domain, p.question) for p in many}) == 300
    assert make_problems(domain, level, 60, seed=5) == many[:60]
    assert make_problems(domain, level, 60, seed=6) != many[:60]
    assert make_problems(domain, level, 0, seed=5) == []


def test_a_row_of_people_is_on_one_side_with_all_its_questions_and_tellings(monkeypatch):
    monkeypatch.setattr(verify, "_NAMES", ["Al", "Bo", "Cy", "Di"])  # so few that every problem can be looked at
    sides = []
    for held_out in (False, True):
        with pytest.raises(ValueError) as error:
            make_problems("logic", 1, 9000, seed=1, held_out=held_out)
        count = int(re.search(r"has (\d+)", str(error.value))[1])
        seen = [{p.question for p in make_problems("logic", 1, count, seed, held_out)} for seed in range(16)]
        assert all(len({identity("logic", question) for question in questions}) == count for questions in seen)
        sides.append({})
        for question in set.union(*seen):
            row, moves, place, choices = row_of(question)
            sides[-1].setdefault((*row, *moves), set()).add((place, choices is None))
    assert not sides[0].keys() & sides[1].keys() and len(sides[0]) + len(sides[1]) == 24 * 8
    assert 0.06 < len(sides[1]) / (24 * 8) < 0.2
    for asked in [*sides[0].values(), *sides[1].values()]:
        assert asked == set(itertools.product((1, 2, 3, 4), (False, True)))


@pytest.mark.parametrize("level", LEVELS)
def test_no_guess_pays_in_a_row_of_people(level):
    rows = [(*row_of(p.question), p.answer) for p in make_problems("logic", level, 1500, seed=4)]
    for place in (1, 2, 3, 4):
        assert 0.2 < sum(row[2] == place for row in rows) / len(rows) < 0.3
    letters = [row[4] for row in rows if row[3]]
    assert 0.45 < len(letters) / len(rows) < 0.55
    assert all(0.28 < letters.count(letter) / len(letters) < 0.39 for letter in "ABC")
    assert all(len(set(choices)) == 3 and set(choices) < set(row) for row, _, _, choices, _ in rows if choices)
    names = [row[0].index(row[4]) for row in rows if not row[3]]
    assert all(0.2 < names.count(first) / len(names) < 0.3 for first in range(4))


def test_one_problem_in_eight_is_held_out_and_the_supply_ends_with_an_error():
    counts = {}
    for held_out in (False, True):
        side, hint = ("held-out", r" \(--eval_problems\)") if held_out else ("training", "")
        supply = rf"^math level 1 has (\d+) {side} problems, 9000 were asked for{hint}$"
        with pytest.raises(ValueError, match=supply) as error:
            make_problems("math", 1, 9000, seed=1, held_out=held_out)
        counts[held_out] = int(re.search(r"has (\d+)", str(error.value))[1])
        everything = make_problems("math", 1, counts[held_out], seed=2, held_out=held_out)
        assert len({symbols_of(p.question) for p in everything}) == counts[held_out]
        with pytest.raises(ValueError, match="were asked for"):
            make_problems("math", 1, counts[held_out] + 1, seed=2, held_out=held_out)
    changes = [change for change in range(-9, 10) if change]
    proper = sum(0 <= start + change <= verify.TOP for start in range(verify.TOP + 1) for change in changes)
    assert sum(counts.values()) == proper + verify.TOP // 2 + 1
    assert 0.06 < counts[True] / sum(counts.values()) < 0.2


@pytest.mark.parametrize("arguments", [("chess", 1), ("Math", 1), ("", 2), (None, 1), ("math", 0), ("code", 9),
                                       ("logic", -1), ("math", 2.5), ("math", "3"), ("code", None)])
def test_wrong_domain_or_level(arguments):
    with pytest.raises(ValueError, match="math, code, logic"):
        make_problems(*arguments, n=1, seed=0)


def test_every_process_draws_the_same():
    drawn = "[make_problems(d, l, 20, 7, h) for d in DOMAINS for l in (1, 4, 8) for h in (False, True)]"
    for seed in ("0", "1", "random"):
        output = subprocess.run([sys.executable, "-c", f"from verify import *; print({drawn})"], cwd=ROOT, check=True,
                                env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout
        assert output == f"{eval(drawn)}\n"


def test_two_draws_at_once_do_not_disturb_each_other_and_the_global_generator_is_left_alone():
    alone, found = make_problems("code", 4, 400, seed=9), []
    state = random.getstate()
    threads = [threading.Thread(target=lambda: found.append(make_problems("code", 4, 400, seed=9))) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [alone] * 3 and random.getstate() == state


# --- Extraction ---

EXTRACTED = [
    ("5+6=11 #### 11", "11"), ("####11", "11"), ("#### 4\n#### 6", "6"), ("#### 12 pens\nand more", "12 pens"),
    ("####\n17", "17"), ("#### \\boxed{17}", "17"), ("a #### 3 b \\boxed{8}", "8"), ("\\boxed{8} then #### 3", "3"),
    (r"so \boxed{\frac{3}{4}} it is", r"\frac{3}{4}"), (r"\boxed{\sqrt{\frac{a}{b}}}", r"\sqrt{\frac{a}{b}}"),
    (r"\boxed{1}, no, \boxed{2}", "2"), (r"\boxed {19}", "19"), (r"$\boxed{\text{Di}}$", r"\text{Di}"),
    (r"\boxed{x^{2^{3}}+{1}}", r"x^{2^{3}}+{1}"), (r"\boxed{ 41 }.", "41"), ("<answer>62</answer>", "62"),
    ("<answer>\n 62 \n</answer> done", "62"), ("<answer>\\boxed{62}</answer>", "62"),
    ("<answer>The answer is 62</answer>", "62"), ("<answer>1</answer><answer>2</answer>", "2"),
    ("The answer is 31.", "31."), ("the final answer is: 31", "31"), ("The answer is 31. It is prime.", "31"),
    ("The answer is $31$.\nBye", "$31$"), ("Answer: 31", "31"), ("ANSWER: 31", "31"), ("**Answer:** 31", "31"),
    ("**Answer**: 31", "31"), ("Final Answer: **31**", "**31**"), ("Answer:\n\n31", "31"),
    ("answer is 3.5 km", "3.5 km"), ("The answer is\n\\boxed{90}", "90"), (r"\boxed{\text{Answer: 55}}", "55"),
    ("The answer is Cy! Yes", "Cy"),
]
NO_ANSWER = ["", "18", "I think it is 18", "####", "####   \n  ", r"\boxed{18", r"\boxed{}", r"\boxed{ }", r"\boxed 18",
             r"\boxed{\frac{1}{2}", r"\boxed{5} but wait \boxed{6", "<answer>18", "<answer></answer>", "answer",
             "the answer 18", "The answer isn't 18", "answers: 18", "##### 18", "### 18", "#### 5 ####",
             "<answer>5</answer> <answer>", "boxed{18}", "Answer:", "{18}", "</answer>18", "= 18", "The answer is",
             "####\n####"]


@pytest.mark.parametrize("text,answer", EXTRACTED)
def test_extracted(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", NO_ANSWER)
def test_no_answer_is_none_and_earns_nothing(text):
    assert extract_answer(text) is None
    assert reward(text, "18") == reward(text, "5") == reward(text, "") == 0.0


# --- Comparison ---

EQUAL = [
    # numbers as people write them
    ("41", "41"), ("41.", "41"), ("41.0", "41"), ("041", "41"), ("+41", "41"), (" 41 ", "41"), ("41!", "41"),
    (".5", "0.5"), ("0.50", "1/2"), ("-7", "-7"), ("\u22127", "-7"), ("- 7", "-7"), ("\u2212 7.0", "-7"),
    ("$-7$", "-7"), ("-$7", "-7"), ("\u20137", "-7"), ("1,234", "1234"), ("1,234,567.50", "1234567.5"),
    ("-12,000", "-12000"), (r"1\,234", "1234"), (r"1{,}234", "1234"), (r"1,\!234", "1234"),
    (r"12\,345\,678", "12345678"), ("0.1", "1/10"), ("0.3", "3/10"), ("12345678901234567890", "12345678901234567890.0"),
    # currency, percent, units, words
    ("$36.00", "36"), ("36$", "36"), ("\u20ac36", "36"), ("\u00a336.5", "36.5"), (r"\$36", "36"), ("36 dollars", "36"),
    ("15%", "15"), (r"15\%", "15"), ("15 percent", "15"), ("15 %", "15%"), ("48 eggs, in total", "48"),
    ("48 eggs.", "48"), ("9 miles/hour", "9"), ("9 kg", "9"), ("9kg", "9"), (r"9\text{ cm}", "9"),
    (r"9\,\text{cm}", "9"), (r"9\;\mathrm{m}", "9"), (r"9\ \text{m}", "9"), (r"60^\circ", "60"), (r"60^{\circ}", "60"),
    ("60\u00b0", "60"), ("48 (eggs)", "48"), ("48 boys' hats", "48"), ("3 a day", "3"),
    # fractions
    ("3/4", "0.75"), ("6/8", "3/4"), (r"\frac{3}{4}", "3/4"), (r"\frac34", "0.75"), (r"\dfrac{3}{4}", "3/4"),
    (r"\tfrac34", "3/4"), (r"\frac3{4}", "3/4"), (r"\frac{3}4", "3/4"), (r"-\frac{3}{4}", "-3/4"),
    (r"\frac{-3}{4}", "-0.75"), ("3 / 4", "3/4"), ("1 3/4", "7/4"), ("1 3/4", "1.75"), (r"1\frac{3}{4}", "7/4"),
    (r"1\frac34", "7/4"), ("-1 3/4", "-7/4"), ("5 1/3", "16/3"), ("1,000/3", "1000/3"), ("10/5", "2"),
    ("3/4 of a pie", "3/4"), ("0/5", "0"), ("-0", "0"),
    # dress
    ("**58**", "58"), ("**58** pens", "58"), ("*58*", "58"), ("`58`", "58"), ("$58$", "58"), ("$$58$$", "58"),
    (r"\text{58}", "58"), (r"\textbf{58}", "58"), (r"\mathbf{58}", "58"), ("x=58", "58"), ("x = 58", "58"),
    ("= 58", "58"), ("$y = 58$.", "58"), ("(58)", "58"), ("\"58\"", "58"), ("'58'", "58"), (r"\boxed{58}", "58"),
    (r"\quad 58", "58"), ("~58", "58"), ("58**", "58"), (r"\left(58\right)", "58"),
    (r"\(58\)", "58"), (r"\[ 58 \]", "58"), (r"\(-\frac{5}{8}\)", "-5/8"), (r"\(\text{58 pens}\)", "58"),
    (r"5\!,\!800", "5800"), (r"58\text{ cm}^2", "58"), ("58 km^{2}", "58"), (r"58\,\mathrm{ft}^3", "58"),
    # letters, yes and no, names
    (r"\(C\)", "C"), ("C", "C"), ("c", "C"), ("(C)", "C"), ("C.", "C"), ("C)", "C"), ("C) Cy", "C"), ("(C) Cy", "C"),
    ("C. Cy", "C"),
    ("C: 42", "C"), ("**C**", "C"), (r"\text{C}", "C"), (r"\text{(C)}", "C"), ("Option C", "C"), ("choice (C)", "C"),
    ("C", "(C)"), ("C", "C) Cy"), ("Yes", "yes"), ("YES.", "yes"), ("yes, it is", "yes"), ("No.", "no"),
    ("**No**", "No"), ("True", "true"), ("(no)", "No"), ("Di", "di"), ("DI.", "Di"), ("**Di**", "Di"),
    (r"\text{Di}", "Di"), ("'Di'", "Di"), ("New  York", "new york"), ("\u00c9va", "\u00e9va"),
    # pairs, lists, times, ratios, other texts
    ("0,1", "(0, 1)"), ("(2, -3)", "(2,-3)"), ("(1/2, 3)", "(0.5, 3)"), ("5, 6, 7", "5,6,7"), ("4:30", "4:30"),
    ("4 : 30", "4:30"), ("4:30 pm", "4:30 PM"), ("2:3", "2 : 3"), (r"\sqrt{2}", r"\sqrt{2}"), (r"2\pi", r"2 \pi"),
    ("x^2+1", "x^2 + 1"), ("[0,1]", "[0, 1]"), ("5 or 6", "5 or 6"), ("10^{99}", "10^{99}"), (r"\{1,2\}", r"\{1, 2\}"),
    ("y^{3}", "y^3"), ("3^{12}", "3^12"), ("3^{k-2}", "3^(k-2)"), (r"\frac{y}{3}", "y/3"), (r"\frac{5y}{3}", "5y/3"),
    (r"-\frac{y}{3}", "-y/3"), (r"\dfrac{\pi}{3}", r"\frac{\pi}{3}"), (r"\frac{\pi}{3}", r"\pi/3"),
    (r"\frac{y-1}{3}", "(y-1)/3"), (r"\frac{3}{y-1}", "3/(y-1)"), (r"\frac{\sqrt{5}}{3}", r"\dfrac{\sqrt5}{3}"),
    (r"\mathbf{y^{3}}", "y^3"), (r"\frac{3}{5}\text{ cup}", "0.6"), (r"\frac{1}{4}\%", "0.25%"), ("{58}", "58"),
    (r"\left(\frac{3}{5}, 2\right)", "(0.6, 2)"), ("4 P.M.", "4 pm"), ("5 quarters", "5"),
]
DIFFERENT = [
    # several candidates, denials
    ("5 or 6", "5"), ("5 or 6", "6"), ("5, 6, 7", "5"), ("5, 6, 7", "7"), ("5 and 6", "6"), ("5 to 6", "5"),
    ("5-6", "5"), ("5\u20136", "5"), ("5 6", "5"), ("5 6", "56"), ("5/6/7", "5/6"), ("not 5", "5"), ("5, not 6", "6"),
    ("between 5 and 6", "5"), ("5 or six", "5"), ("5; 6", "5"), ("5\n6", "5"), ("$5$6$", "56"), ("5**6", "56"),
    ("5 maybe six", "5"), ("either 5", "5"), ("5 vs six", "5"), ("5 (6)", "5"), ("(5, 6)", "5"), ("{5}, {6}", "5"),
    ("5 = 6", "6"), ("5|6", "5"), ("5 & 6", "6"), ("~5, 6", "5"), ("5 five six", "5"), ("5, six", "5"),
    # other numbers
    ("41.001", "41"), ("41", "14"), ("-41", "41"), ("4 1", "41"), ("41e0", "41"), ("0.333", "1/3"), ("1/3", "1/4"),
    ("1.75", "1 3/5"), ("1 3/4", "1"), ("1 3/4", "3/4"), ("13/4", "1 3/4"), ("4/3", "3/4"),
    (r"\frac{3}{4}", r"\frac{4}{3}"), ("1,23", "123"), ("1,23", "1.23"), ("0,1", "0.1"), ("0,1", "1"), ("0,1", "0"),
    ("0,123", "123"), ("12,34", "1234"), ("1,2345", "12345"), ("1.234.567", "1234567"), ("5k", "5"),
    ("5 thousands", "5"), ("5 bn", "5"), ("5 mil", "5"), ("5M", "5"), ("5 halves", "5"), ("2 thirds", "2"),
    ("3 hundredths", "3"), ("5 cubed", "5"), ("5 factorial", "5"), ("5 negative", "5"), ("5 dozens", "5"),
    ("5 thousand", "5"), ("5 million", "5"), ("5 dozen", "5"), ("5 squared", "5"), ("5 and a half", "5"), ("5x", "5"),
    ("5 x", "5"), ("5!!2", "5"), ("5^2", "5"), ("5 + 0", "5"), ("5*1", "5"), (r"5\pi", "5"), ("5 pi", "5"),
    (r"5\sqrt{2}", "5"), ("5i", "5"), ("f(5)", "5"), ("ab=5", "5"), ("0x5", "5"), ("5%%3", "5"), ("5_0", "50"),
    ("1" + "0" * 30, "1" + "0" * 30 + ".1"), ("1/" + str(2 ** 99), "1/" + str(2 ** 98)), ("9" * 50, "9" * 49 + "8"),
    ("5m^2", "5"), ("5 n^2", "5"), ("5 cm^4", "5"), ("5 cm^2 6", "5"), (r"\(5\)\(6\)", "56"),
    (r"\(5\) or \(6\)", "5"), (r"5\!,\!80", "580"),
    # what cannot be read
    ("", ""), (" ", " "), ("1/0", "1/0"), ("1/0", "0"), ("0/0", "0"), ("3/0.0", "3"), (r"\frac{1}{0}", "1"),
    ("1/0, 2", "2"), (r"\text{}", ""), ("$$", ""), (".", "."), ("**", ""), ("9" * 201, "9" * 201), ("nan", "1"),
    ("inf", "1"), ("1e999", "1"), ("-inf", "0"), ("1_000", "1000"), ("NaN", "0"), ("\u0663", "3"),
    ("\u0661\u0668", "18"), ("\uff15", "5"), ("\u00bd", "1/2"), ("5\u00b2", "5"), ("5\u00bd", "5"), ("5 \u00d7 2", "5"),
    ("5\u00b7 2", "5"), ("\u0be7", "1"), ("2\u0663", "2"),
    # letters, yes and no, names
    ("B", "C"), ("B or C", "C"), ("B) or C)", "B"), ("B, C", "B"), ("B, C", "C"), ("A B C", "A"), ("ABC", "A"),
    ("(A)(B)", "A"), ("B. not C", "B"), ("not C", "C"), ("A/C", "A"), ("Cy", "C"), ("C", "Cy"), ("yes or no", "yes"),
    ("yes, no", "yes"), ("no, yes", "no"), ("yes", "no"), ("not yes", "yes"), ("yesno", "yes"), ("Bo or Di", "Bo"),
    ("not Di", "Di"), ("Di, Bo", "Di"), ("Bo Di", "Di"), ("Dix", "Di"), ("D i s", "Di"), ("1", "A"), ("A", "1"),
    # pairs, times, ratios
    ("(1,2)", "(2,1)"), ("(1,2)", "(1,2,3)"), ("[0,1]", "(0,1)"), ("4:30", "4.5"), ("4:30", "4"), ("4:30", "30"),
    ("4:30", "4:31"), ("2:3", "2/3"), ("2:3", "3:2"), ("2:3", "2,3"), ("4:30 am", "4:30 pm"), ("5", "(5, 5)"),
    ("10^{99}", "10^{98}"), ("1/2^{99}", "1/2^{98}"), (r"\sqrt{2}", r"\sqrt{3}"), ("5", "5 or 6"),
    # what braces and fraction bars hold together
    (r"y-\frac{3}{5}", r"\frac{y-3}{5}"), (r"\frac{2}{n}-1", r"\frac{2}{n-1}"), (r"\frac{4}{5}y", r"\frac{4}{5y}"),
    (r"\frac{2-\pi}{3}", r"2-\frac{\pi}{3}"), ("3^{k}-2", "3^{k-2}"), (r"\sqrt{y}-1", r"\sqrt{y-1}"),
    ("c^{3}y", "c^{3y}"), ("b_{2}0", "b_{20}"), ("3^{2}0", "3^{20}"), (r"\frac{1}{4}7", "1/47"),
    (r"\frac{1}{4}7", "7/4"),
    (r"\frac{y}{4}7", r"\frac{y}{47}"), ("y^{a}b/2", "y^{ab}/2"), (r"\frac{\frac{1}{3}}{4}", r"\frac{1}{\frac{3}{4}}"),
    (r"\frac{y}{2}+1", r"\frac{y}{2+1}"), (r"x^{\frac{1}{2}}", r"\frac{x^{1}}{2}"),
    # ordinals, tens, hours
    ("2 fourths", "2"), ("7 ninth", "7"), ("3 tens", "3"), ("6 thousandths", "6"), ("4 p.m.", "4"),
    ("4 p.m.", "4 a.m."),
]


@pytest.mark.parametrize("answer,gold", EQUAL)
def test_equal(answer, gold):
    assert answers_match(answer, gold) is True
    assert answers_match(gold, answer) is True
    if "\n" not in answer:
        assert reward(f"so\n#### {answer}", gold) == 1.0
    assert reward(f"<answer>{answer}</answer>", gold) == 1.0


@pytest.mark.parametrize("answer,gold", DIFFERENT)
def test_different(answer, gold):
    assert answers_match(answer, gold) is False
    assert answers_match(gold, answer) is False
    assert reward(f"<answer>{answer}</answer>", gold) == 0.0


@pytest.mark.parametrize("text", [r"\boxed{5, 6, 7}", "#### 5 or 6 or 7", "1 2 3 4 5 6 7", "#### 1 2 3 4 5 6 7",
                                  "Answer: 5/6/7", r"\boxed{5} \boxed{6} \boxed{7} \boxed{}",
                                  "The answer is 5 or 6 or 7.", "<answer>5 6 7</answer>"])
def test_listing_candidates_never_earns(text):
    assert not any(reward(text, gold) for gold in "1 2 3 4 5 6 7".split())


def test_numbers_agree_with_exact_fractions():
    rng = random.Random(11)
    for _ in range(2000):
        a, b = Fraction(rng.randint(-99, 99), rng.randint(1, 12)), Fraction(rng.randint(-99, 99), rng.randint(1, 12))
        whole, rest = divmod(abs(a), 1)
        sign = "-" if a < 0 else ""
        forms = [str(a), f"{sign}\\frac{{{abs(a).numerator}}}{{{abs(a).denominator}}}"]
        forms += [f"{sign}{whole} {rest}"] if whole and rest else []
        for form in forms:
            assert answers_match(form, str(b)) is (a == b), (form, b)
            assert answers_match(form, f"{a.numerator * 3}/{a.denominator * 3}")
        number = rng.randint(-10 ** 9, 10 ** 9)
        assert answers_match(f"{number:,}", str(number)) and answers_match(f"${number:,}.00", str(number))
        assert not answers_match(f"{number:,}", str(number + 1))


def test_a_bug_is_not_a_quiet_zero():
    for text, gold in ((None, "5"), (5, "5"), ("#### 5", None), ("#### 5", 5)):
        with pytest.raises((TypeError, AttributeError)):
            reward(text, gold)


# --- Hostile text ---

PIECES = ["\\boxed{", "\\boxed {", "\\boxed", "{", "}", "####", "#", " ", "\n", "<answer>", "</answer>", "<answer",
          "answer is ", "answer", "Answer:", "**", "9", "9" * 300, "1e999", "nan", "inf", "1_000", "9**9**9**9",
          "__import__('os').system('true')", "\\frac{", "\\frac", "1/0", "/", ",000", "1,", ".", "-", "\u2212", "$",
          "\\text{", "\\,", "\\!", "x=", "(", ")", ":", "%", "5 or 6", "B)", "\u0663", "\u00bd", "\0", "\ud800",
          "\U0001f600", "\u0130", "yes", "no", "a", "\t", "\r\n", "\\", "^\\circ", "2 2/3", "eggs "]
NEAR_MATCHES = ["#", "#### ", "####\n", "\\boxed{", "\\boxed", "{", "}", "\\boxed{}", "<answer>", "<answer></answer>",
                "answer", "answer ", "answer is ", "Answer:", "answer** ", "9", "#### 9", " ", "\n", "1,000", "a",
                "\\frac{", "$", "Aanswer", "answer is: ** ", "\u0663", "\\", "<", "{}"]


def hostile(rng, longest):
    if rng.random() < 0.5:
        unit = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))
        text = unit * (rng.randint(1, longest) // len(unit) + 1)
    else:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 60)))
    start, end = rng.choice(["", "#### ", "\\boxed{", "<answer>"]), rng.choice(["", "}", "</answer>", "\n#### 9x"])
    return (start + text[:longest - 30] + end)[:longest]


GOLD_NOBODY_WRITES = "731.25"


def test_hostile_strings_earn_nothing_and_never_raise():
    rng = random.Random(0)
    for _ in range(400):
        text = hostile(rng, 5000)
        assert reward(text, GOLD_NOBODY_WRITES) == 0.0
        assert answers_match(text, GOLD_NOBODY_WRITES) is False
        assert answers_match(text[:rng.randint(0, 200)], GOLD_NOBODY_WRITES) is False


def test_only_a_bounded_part_of_a_text_is_read_closely():
    for nines in (150, 5000, 200_000):
        long = "9" * nines
        for text in (f"#### {long}", f"\\boxed{{{long}}}", f"answer is {long}/3", f"<answer>{long}</answer>"):
            assert reward(text, "9") == 0.0 and len(extract_answer(text) or "") <= 2 * verify.LONGEST_ANSWER
    assert reward("#### 5" + "\n" + "x" * 190_000, "5") == 1.0 and reward("x" * 190_000 + "#### 5", "5") == 1.0


@pytest.mark.parametrize("payload", ["9**9**9**9", "10^10^10^10", "__import__('os').getpid()", "1e999", "nan", "inf",
                                     "-inf", "1_000", "1e3", "0x10", "9" * 5000, "1/" + "9" * 5000, "1" + ",000" * 60,
                                     "((((" * 40, "\\frac{" * 33, "2 " * 99, "(" * 199, "1/0", "10**3"])
def test_payloads(payload):
    for gold in ("1", "0", "10", "16", "1000", "9", "2"):
        for text in (f"#### {payload}", f"\\boxed{{{payload}}}", f"<answer>{payload}</answer>", f"answer is {payload}"):
            assert reward(text, gold) == 0.0


@pytest.mark.slow
def test_fuzz_no_string_takes_more_than_50_ms(tried):
    rng = random.Random(1)
    texts = [near * (200_000 // len(near)) for near in NEAR_MATCHES]
    texts += [start + near * (199_000 // len(near)) + end for near in NEAR_MATCHES
              for start in ("#### ", "\\boxed{", "<answer>") for end in ("", "}", "</answer>")]
    for number in range(20_000 + len(texts)):
        text = texts.pop() if texts else hostile(rng, rng.choice((200, 2000, 20_000) if number % 20 else (200_000,)))
        took = 1.0
        for _ in range(3):  # the best of three: another program's turn on the processor is not the verifier's time
            start = time.process_time()
            assert reward(text, GOLD_NOBODY_WRITES) == 0.0
            took = min(took, time.process_time() - start)
            if took < 0.05:
                break
        assert took < 0.05, (took, len(text), text[:80])
        tried["strings fuzzed"] += 1


def test_a_worker_thread_gives_the_same():
    rows = [(f"#### {answer}", gold) for answer, gold in EQUAL + DIFFERENT]
    here, there = [reward(*row) for row in rows], []
    thread = threading.Thread(target=lambda: there.extend(reward(*row) for row in rows))
    thread.start()
    thread.join()
    assert there == here


# --- Files ---

def write(tmp_path, *records, raw=None):
    path = tmp_path / "data.jsonl"
    path.write_bytes(raw if raw is not None else "\n".join(json.dumps(record) for record in records).encode())
    return path


LOADED = [
    ({"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}, Problem("2+2?", "It is <<2+2=4>>4.\n#### 4", "4")),
    ({"question": "Big?", "answer": "so\n#### 12,500"}, Problem("Big?", "so\n#### 12,500", "12,500")),
    ({"problem": "Half?", "solution": r"Thus $\boxed{\frac{1}{2}}$."},
     Problem("Half?", r"Thus $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}")),
    ({"problem": "Both?", "solution": r"\boxed{7}", "answer": "7", "level": 5}, Problem("Both?", r"\boxed{7}", "7")),
    ({"problem": "Unmarked?", "solution": "It is seven.", "answer": "7"},
     Problem("Unmarked?", "It is seven.\n#### 7", "7")),
    ({"question": "Bare?", "answer": "Paris"}, Problem("Bare?", "#### Paris", "Paris")),
    ({"question": "Number?", "answer": 42}, Problem("Number?", "#### 42", "42")),
    ({"question": "Number?", "answer": -2.5}, Problem("Number?", "#### -2.5", "-2.5")),
    ({"question": "Small?", "answer": 2e-7}, Problem("Small?", "#### 0.0000002", "0.0000002")),
    ({"question": "Large?", "answer": 3e16}, Problem("Large?", "#### 30000000000000000", "30000000000000000")),
    ({"question": "Boxed?", "answer": r"\boxed{3}"}, Problem("Boxed?", r"\boxed{3}", "3")),
    ({"question": " H\u00f6he? ", "answer": " 3 m ", "note": None}, Problem("H\u00f6he?", "#### 3 m", "3 m")),
]


@pytest.mark.parametrize("record,problem", LOADED)
def test_load(tmp_path, record, problem):
    assert load_problems(write(tmp_path, record)) == [problem]
    assert reward(problem.solution, problem.answer) == 1.0


REFUSED = [
    (b"{", "not JSON"), (b"question: 1", "not JSON"), (b"{'question': 'q'}", "not JSON"),
    (b"[1, 2]", "not a JSON object"), (b'"text"', "not a JSON object"), (b"7", "not a JSON object"),
    (b"null", "not a JSON object"), (b"{}", "question"), (b'{"question": "q"}', "answer"),
    (b'{"answer": "4"}', "question"), (b'{"question": "", "answer": "4"}', "question"),
    (b'{"question": "q", "answer": ""}', "answer"), (b'{"question": "q", "answer": "  "}', "answer"),
    (b'{"question": "q", "answer": NaN}', "answer"), (b'{"question": "q", "answer": -Infinity}', "answer"),
    (b'{"question": "q", "answer": true}', "answer"), (b'{"question": "q", "answer": null}', "answer"),
    (b'{"question": "q", "answer": ["4"]}', "answer"), (b'{"question": ["q"], "answer": "4"}', "question"),
    (b'{"question": "q", "answer": {"a": 4}}', "answer"), (b'{"question": null, "answer": "4"}', "question"),
    (b'{"question": "q", "answer": "work\\n####"}', "no answer"),
    (b'{"question": "q", "answer": "#### 1/0"}', "no answer"),
    (b'{"question": "q", "answer": "\\\\boxed{5"}', "no answer"),
    (b'{"question": "q", "answer": "\\\\boxed{}"}', "no answer"),
    (b'{"problem": "q", "solution": "no box here"}', "no answer"), (b'{"question": "q", "answer": "3/0"}', "no answer"),
    (b'{"question": "q", "answer": "$$"}', "no answer"),
    (b'{"question": "q", "answer": "' + b"9" * 300 + b'"}', "no answer"),
    (b'{"question": "q", "answer": ' + b"9" * 6000 + b"}", "line 3"), (b"[" * 100_000, "line 3"),
    (b'{"question": "\xff", "answer": "4"}', "line 3"),
]


@pytest.mark.parametrize("line,reason", REFUSED)
def test_refused_lines_are_named(tmp_path, line, reason):
    fine = b'{"question": "fine?", "answer": "yes"}\n'
    path = write(tmp_path, raw=fine + b"\n" + line + b"\n" + fine)
    with pytest.raises(ValueError) as error:
        load_problems(path)
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: ") and reason in message and "\n" not in message


def test_empty_and_missing_files(tmp_path):
    for raw in (b"", b"\n\r\n  \n", b"\xef\xbb\xbf"):
        with pytest.raises(ValueError, match="data.jsonl: no problems"):
            load_problems(write(tmp_path, raw=raw))
    with pytest.raises(FileNotFoundError):
        load_problems(tmp_path / "absent.jsonl")


def test_bom_crlf_blank_lines_and_any_locale(tmp_path):
    records = [{"question": f"Wie gro\u00df? {n}", "answer": f"#### {n}"} for n in range(3)]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path = write(tmp_path, raw=("\ufeff" + "\r\n\r\n".join(lines) + "\r\n").encode())
    expected = [Problem(f"Wie gro\u00df? {n}", f"#### {n}", str(n)) for n in range(3)]
    assert load_problems(path) == load_problems(str(path)) == expected
    code = "import sys, verify; print(ascii(verify.load_problems(sys.argv[1])))"
    output = subprocess.run([sys.executable, "-X", "utf8=0", "-c", code, str(path)], cwd=ROOT, check=True,
                            env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True).stdout
    assert output.strip() == ascii(expected)


def test_a_file_is_read_a_line_at_a_time(tmp_path):
    path = write(tmp_path, raw=b'{"question": "first?", "answer": "1"}\nbroken\n' + b"x" * 1000)
    with open(path, "ab") as file:
        file.truncate(1 << 40)  # a terabyte of nothing, sparse, behind the bad line: slurping it would fail
    with pytest.raises(ValueError, match="line 2"):
        load_problems(path)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not here")
def test_gsm8k_as_published():
    problems = [problem for name in ("train.jsonl", "test.jsonl") for problem in load_problems(GSM8K / name)]
    assert len(problems) == 8792
    for problem, other in zip(problems, problems[1:] + problems[:1]):
        assert reward(problem.solution, problem.answer) == 1.0
        same = int(problem.answer.replace(",", "")) == int(other.answer.replace(",", ""))
        assert reward(problem.solution, other.answer) == float(same)


# --- The demonstration ---

def test_running_the_file_shows_graded_samples():
    output = subprocess.run([sys.executable, "verify.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert all(f"=== {domain} " in output for domain in DOMAINS)
    assert all(len(re.findall(rf"\d  {verdict} +\S", output)) >= 3 for verdict in ("right", "wrong", "no answer"))


def test_a_reader_that_leaves_early_sees_no_traceback():
    with subprocess.Popen([sys.executable, "-u", "verify.py"], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        process.stdout.close()  # as `python verify.py | head -1` does
        assert process.stderr.read() == b""
