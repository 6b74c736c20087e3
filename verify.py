"""Problems with known answers, and the verifier that turns an answer into a reward.

Three domains of generated problems stand in for the math, code and commonsense data of the GMTS paper. The level (1 to
8) is the number of steps; a worked solution writes down one small result per step, then marks the answer:
    math    Ann has 7 nuts, finds 5, loses 3. How many?           7+5=12 -3=9 #### 9
    code    a=3 / a=a*2 / for i in range(2):a=a+4 / print(a)      3 *2=6 i=0 +4=10 i=1 +4=14 #### 14
    logic   Al Bo Cy Di: 12 <<. 1st?  (swap; all move up)     ABCD 12 BACD << ACDB #### Al
`load_problems` reads other people's problems: GSM8K and MATH files as published. `reward` compares the last marked
answer of a text with the gold answer, exactly where both are numbers; nothing in the text is ever run.
`python verify.py` shows samples of all three domains, graded.
"""
import hashlib
import itertools
import json
import math
import random
import re
import signal
from collections import deque, namedtuple
from decimal import Decimal
from fractions import Fraction

DOMAINS = ("math", "code", "logic")
LEVELS = range(1, 9)
TOP = 29  # math and code stay in 0..TOP: a small model has few sums to learn and can spend itself on the chain
Problem = namedtuple("Problem", "question solution answer")  # three texts; the solution ends in the marked answer

# --- The three domains ---
# `_shapes` lists the kinds of problem of a level, with how many there are of each. A domain's function turns a kind and
# a number below that count into a problem; None where there is no proper one (a value leaves 0..TOP, say). Start values
# come from the whole range and no operation or move occurs twice: a long chain is only more of the same steps.
_CHANGES = [f"{sign}{digit}" for sign in "+-" for digit in range(1, 10)] + ["*2"]
_PEOPLE, _THINGS = ("Ann", "Bob", "Cal", "Dee"), ("nuts", "figs", "pens", "eggs")
_VERBS = {"+": ("finds", "gets", "buys"), "-": ("loses", "gives", "sells")}
_BOUNDS = (4, 9, 14, 19)
_NAMES = "Al Bo Cy Di Ed Fe Gi Hu Ik Jo Ky Lu Mo Ni Oz Pa Ro Si Ty Ul Vi Wu Xi Yu Zo".split()
_PLACES = ("1st", "2nd", "3rd", "4th")
# Who stands where in a row of four after a move: 12 swaps the first two, << moves all up and the first to the end
_MOVES = {"12": (1, 0, 2, 3), "13": (2, 1, 0, 3), "14": (3, 1, 2, 0), "23": (0, 2, 1, 3), "24": (0, 3, 2, 1),
          "34": (0, 1, 3, 2), "<<": (1, 2, 3, 0), ">>": (3, 0, 1, 2)}


def _shapes(domain, level):
    if domain == "math":
        return [(level, (TOP + 1) * math.perm(len(_CHANGES), level))]
    if domain == "logic":
        return [(level, 4 * math.perm(len(_NAMES), 4) * math.perm(len(_MOVES), level))]
    shapes = []  # of programs, a character a line: 1 is plain, ? an `if`, 2 or 3 a loop of so many rounds
    for special in ("", "?", "2", "3", "2?", "3?"):
        plain = level - sum(1 if line == "?" else int(line) for line in special)
        for shape in sorted(set(itertools.permutations(special + "1" * plain))) if plain >= 0 else []:
            count = (TOP + 1) * len(_BOUNDS) ** shape.count("?") * math.perm(len(_CHANGES), len(shape))
            shapes.append((shape, count))
    return shapes


def _pick(number, options, count):
    """`count` different options, in order: another choice for each number below math.perm(len(options), count)."""
    options, chosen = list(options), []
    for _ in range(count):
        number, place = divmod(number, len(options))
        chosen.append(options.pop(place))
    return chosen


def _compute(left, sign, right):
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return value if 0 <= value <= TOP else None


def _math_problem(level, number, rng):
    number, start = divmod(number, TOP + 1)
    changes, values = _pick(number, _CHANGES, level), [start]
    for change in changes:
        values.append(_compute(values[-1], change[0], int(change[1])))
        if values[-1] is None:
            return None
    if rng.random() < 0.5:
        question = "(" * (level - 1) + f"{start}{')'.join(changes)}=?"  # ((7+5)-3)*2=?
    else:
        question = f"{rng.choice(_PEOPLE)} has {start} {rng.choice(_THINGS)}"
        for sign, digit in changes:
            question += ", doubles them" if sign == "*" else f", {rng.choice(_VERBS[sign])} {digit}"
        question += ". How many?"
    steps = [f"{change}={value}" for change, value in zip(changes, values[1:])]
    return f"{start}{changes}", question, [f"{start}{steps[0]}"] + steps[1:], str(values[-1])


def _code_problem(shape, number, rng):
    number, value = divmod(number, TOP + 1)
    number, bound = divmod(number, len(_BOUNDS)) if "?" in shape else (number, 0)
    program, steps = [f"a={value}"], [f"{value}"]
    for line, change in zip(shape, _pick(number, _CHANGES, len(shape))):
        head, leads = "", [""]  # what stands before the statement, and before each of its steps
        if line == "?":
            head, leads = f"if a>{_BOUNDS[bound]}:", [f"{value}>{_BOUNDS[bound]} "]
            if value <= _BOUNDS[bound]:
                steps.append(leads.pop() + "no")
        elif line != "1":
            head, leads = f"for i in range({line}):", [f"i={i} " for i in range(int(line))]
        program.append(f"{head}a=a{change}")
        for lead in leads:
            value = _compute(value, change[0], int(change[1]))
            if value is None:
                return None
            steps.append(f"{lead}{change}={value}")
    program = "\n".join(program + ["print(a)"])
    return program, program, steps, str(value)


def _logic_problem(level, number, rng):
    number, place = divmod(number, 4)
    row, moves = _pick(number, _NAMES, 4), _pick(number // math.perm(len(_NAMES), 4), _MOVES, level)
    question, steps = f"{' '.join(row)}: {' '.join(moves)}. {_PLACES[place]}?", ["".join(name[0] for name in row)]
    key = f"{row}{moves}"  # without the place: the four questions about a chain share its worked steps
    for move in moves:
        row = [row[i] for i in _MOVES[move]]
        steps.append(f"{move} {''.join(name[0] for name in row)}")  # no two names share an initial
    answer = row.pop(place)
    if rng.random() < 0.5:
        return key, question, steps, answer
    choices = rng.sample([answer] + rng.sample(row, 2), 3)
    return key, f"{question} A {choices[0]} B {choices[1]} C {choices[2]}", steps, "ABC"[choices.index(answer)]


def make_problems(domain, level, n, seed, held_out=False):
    """Draw n different problems of a domain and level: alike for equal seeds, and a larger n begins like a smaller one.
    One problem in eight is held out, by a hash of the problem and not of its wording: training and held-out problems
    never overlap, whatever the seeds. Nine solutions in ten show all steps, one of these nine ends in a box.
    Raises ValueError for an unknown domain or level, or fewer than n problems. The problems are our own."""
    if domain not in DOMAINS or level not in LEVELS:
        raise ValueError(f"no {domain} level {level}: choose from {', '.join(DOMAINS)}, {LEVELS[0]} to {LEVELS[-1]}")
    generate = {"math": _math_problem, "code": _code_problem, "logic": _logic_problem}[domain]
    shapes = _shapes(domain, level)
    rng = random.Random(f"{domain} {level} {seed}")  # a text seeds alike in every process; hash() would not
    seen, problems = set(), []
    while len(problems) < n:
        if len(seen) == sum(count for _, count in shapes):
            side, hint = ("held-out", " (--eval_problems)") if held_out else ("training", "")
            raise ValueError(f"{domain} level {level} has {len(problems)} {side} problems, {n} were asked for{hint}")
        shape, count = rng.choice(shapes)
        number = rng.randrange(count)
        problem = None if (shape, number) in seen else generate(shape, number, rng)
        seen.add((shape, number))
        if problem is None:
            continue
        key, question, steps, answer = problem
        style = rng.random()
        if (hashlib.sha256(f"{domain} {key}".encode()).digest()[0] % 8 == 0) == held_out:
            if style >= 0.9:
                steps = [re.split("[= ]", step)[-1] for step in steps]
            mark = f"\\boxed{{{answer}}}" if 0.8 <= style < 0.9 else f"#### {answer}"
            problems.append(Problem(question, " ".join(steps + [mark]), answer))
    return problems


# --- The verifier ---
LONGEST_ANSWER = 200  # characters; nothing longer is an answer, so hostile text costs no more than plain text
_MARK = re.compile(r"(?<!#)####(?!#)|\\boxed\s?\{|<answer>|\b(?:[Aa]nswer|ANSWER)\*{0,2}\s?(?:is\b|IS\b|:)[:*]{0,3}")


def extract_answer(text):
    """The last marked answer of a text, as written, or None where there is none (which is not the same as a wrong one).
    Marks are `#### x` (GSM8K), `\\boxed{x}` (MATH), `<answer>x</answer>`, "answer is x" and "Answer: x". Only the last
    counts: if it is empty or never closed there is no answer, whatever stood before: trying several gains nothing."""
    marks = deque(_MARK.finditer(text), maxlen=1)  # keeps the last
    if not marks:
        return None
    mark = marks[0]
    rest = text[mark.end():mark.end() + 2 * LONGEST_ANSWER]  # enough to show that an answer is too long
    depth, end = 1, 0  # a box ends at the brace that closes it, found by counting
    while depth and end < len(rest):
        depth += {"{": 1, "}": -1}.get(rest[end], 0)
        end += 1
    inside, tag, _ = (rest[:end - 1] if depth == 0 else rest).partition("</answer>")
    if mark.group().startswith("\\"):
        return None if depth else rest[:end - 1].strip() or None
    if mark.group() == "<answer>":
        return inside.strip() or None if tag else None
    line_end = r"\n" if mark.group() == "####" else r"\n|[.!?]\s"  # words may go on: "The answer is 18. That is ..."
    return re.split(line_end, inside.strip(), maxsplit=1)[0].strip() or None


_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # which may hold one more pair each
_DRESS = [(re.compile(pattern), plain) for pattern, plain in (
    (r"[\u2212\u2013]", "-"),  # the Unicode minus, and the dash often typed for it
    (rf"\\[dtc]?frac\s*(?:{_BRACED}|([0-9]))\s*(?:{_BRACED}|([0-9]))", r" {\1\2}/{\3\4} "),
    (r"(?<=[0-9])(?:(?:\\!)?,?\\[,!]|\{,\})(?=[0-9]{3})", ","),  # 1\,000 and 1{,}000 are 1,000
    (rf"\\(?:(?:text|math)(?:bf|it|rm)?|mbox|boxed)\s*{_BRACED}", r" \1"),
    (r"\^\{?\\circ\}?|\\(?:(?:text|math)(?:bf|it|rm)?|mbox|boxed|left|right|q?quad)(?![A-Za-z])|\\[][(),;:! ]|~", " "),
    (r"\\(?=[%$])|(?<=\b[APap])\.(?=\s?[Mm]\b)", ""),  # 5 p.m. is 5 pm
    (r"(?<=[0-9])M(?![A-Za-z])", " million"),  # a lower-case m is metres or minutes
    (r"\*\*|[$\u20ac\u00a3\u00a5`\"]", " "),  # a space, so that nothing is joined across them
)]
# Braces that change nothing: those of a letter or a number, as in x^{2}, and of a numerator that is a product
_GROUPS = [*map(re.compile, (r"\{(-?[0-9]+|[a-z]|\\[a-z]+)\}(?!\s*[0-9])", r"(?:^|(?<![\^_])\s)\{([^{}+-]*)\}(?=/)"))]
_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"  # 1,250.5 or 29. or .5
_WORD, _REMARK = r"[a-z\u00df-\u00f6]+", r"(?:[a-z\u00df-\u00f6\s%\u00b0.,;!'()/-]|(?<=[ckm]m|ft|in)\^[23])*"
_NUMBER = re.compile(rf"([+-]?)\s*(?:([0-9]+)\s+(?=[0-9]+\s*/))?({_PLAIN})(?:\s*/\s*({_PLAIN}))?({_REMARK})")
_JOINED_UNITS = set("c f cm mm m km kg g mg l ml ft in lb lbs oz s h hr min mph".split())  # 5kg, but 5k is 5,000
# Words that make a number another one (quarters may be coins) or an answer one of several, or a letter that is no unit
_HEDGES = set("""or and to not nor no yes true false but vs either neither between maybe minus plus times over than half
    pi squared cubed factorial negative bn mil dozen hundred thousand million billion trillion zero one two three four
    five six seven eight nine ten eleven twelve tens dozens hundreds thousands millions billions trillions halves third
    fourth fifth sixth seventh eighth ninth tenth twelfth hundredth thousandth thirds fourths fifths sixths sevenths
    eighths ninths tenths twelfths hundredths thousandths am pm b d e i j k n o p q r t u v w x y z""".split())
_CHOICE = re.compile(r"\(?([a-e]|yes|no|true|false)(?:[).,:]+(.*))?", re.DOTALL)  # B or (B) or B. or B) Cy


def _read_number(text):
    """The exact number a text begins with, if only a unit or remark follows, else None. ZeroDivisionError for 1/0."""
    match = _NUMBER.fullmatch(text)
    if not match:
        return None
    sign, whole, top, bottom, remark = match.groups()
    words = re.findall(_WORD, remark)
    if _HEDGES & set(words) or remark[:1].isalpha() and words[0] not in _JOINED_UNITS:
        return None
    number = int(whole or 0) + Fraction(top.replace(",", "")) / Fraction((bottom or "1").replace(",", ""))
    return -number if sign == "-" else number


def _read(text):
    """What a text says, as a tuple that equals another just when both say the same; None if it says nothing."""
    if len(text) > LONGEST_ANSWER:
        return None
    for pattern, plain in _DRESS:
        text = pattern.sub(plain, text)
    text = text.casefold().strip(" \t\r\n*'_").rstrip(" .,;:!?*'_")
    text = re.sub(r"^(?:(?:option|choice)\s+|(?:[a-z]\s*)?=\s*)", "", text)  # x = 73
    text = re.sub(r"^\(([^()]*)\)$", r"\1", text)  # (73)
    plain = re.sub("[{}]", "", text).strip()
    try:
        for separator in ":,":  # a number alone, a time or ratio; then a pair or more
            numbers = [_read_number(part.strip()) for part in plain.split(separator)]
            if None not in numbers:
                return separator, *numbers
    except ZeroDivisionError:
        return None
    choice = _CHOICE.fullmatch(plain)
    if choice and not (_HEDGES | set("ac")) & set(re.findall(_WORD, choice[2] or "")):
        return "choice", choice[1]
    for pattern in _GROUPS:  # what other braces hold stays together: 2^{n+1} is not 2^{n}+1
        text = pattern.sub(r"\1", text)
    return ("text", "".join(text.split()).translate({ord("{"): "(", ord("}"): ")"})) if plain else None


def answers_match(answer, gold):
    """Whether two answers say the same: equal numbers (exactly), choices or tuples, or else texts. Texts never raise.
    Units, percent signs (10% is 10), case, spaces and LaTeX dress are read over. Candidates ("5 or 6") match neither;
    what cannot be read ("", "1/0", 5,000 digits) matches nothing, not even itself."""
    value = _read(answer)
    return value is not None and value == _read(gold)


def reward(text, gold):
    """1.0 if the last marked answer of a sampled text (never pass its prompt) matches the gold answer, else 0.0.
    Right or wrong, nothing for form: the R of the GMTS paper, the one function a fork replaces. Texts never raise."""
    answer = extract_answer(text)
    return 1.0 if answer is not None and answers_match(answer, gold) else 0.0


# --- Problems from files ---
def load_problems(path):
    """Read a JSON Lines file, one object a line: `question` or `problem`, with `answer` or `solution` or both.
    GSM8K (`answer` ends in "#### 18", arXiv 2110.14168), MATH (boxed `solution`, arXiv 2103.03874), bare answers:
    all load as they are. Raises ValueError with file and line for all else or for no problem; OSError from `open`."""
    problems = []
    with open(path, "rb") as file:  # one line of bytes at a time: any locale, any size
        for number, line in enumerate(file, start=1):
            try:
                line = line.decode("utf-8-sig").strip()
                if line:
                    problems.append(_problem_from(json.loads(line)))
            except (ValueError, RecursionError) as error:
                kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
                raise ValueError(f"{path}, line {number}: {kind}{error}") from None
    if not problems:
        raise ValueError(f"{path}: no problems in it")
    return problems


def _problem_from(record):
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    texts = []
    for name, other in (("question", "problem"), ("solution", "answer"), ("answer", "solution")):
        text = record.get(other) if record.get(name) is None else record[name]
        text = format(Decimal(repr(text)), "f") if type(text) in (int, float) and abs(text) < math.inf else text
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'no text under "{name}" or "{other}"')
        texts.append(text.strip())
    question, solution, answer = texts
    gold = extract_answer(answer) if _MARK.search(answer) or "answer" not in record else answer
    if gold is None or _read(gold) is None:
        raise ValueError("no answer that can be read")
    if extract_answer(solution) is None:
        solution = f"#### {gold}" if solution == answer else f"{solution}\n#### {gold}"
    return Problem(question, solution, gold)


def main():
    """Print problems of each domain, and the grades of right, wrong, missing and evasive answers to the last one."""
    for domain in DOMAINS:
        print(f"\n=== {domain} " + "=" * (70 - len(domain)))
        for level in (1, 3, 6):
            for problem in make_problems(domain, level, 2, seed=0):
                print(f"\n[level {level}] " + problem.question.replace("\n", "\n          "))
                print(f"  worked: {problem.solution}")
        gold = problem.answer
        print(f"\n  answers to the last one (gold: {gold})")
        for text in (problem.solution, f"The answer is **{gold}**.", "#### 40", f"It must be {gold}.",
                     f"#### {gold} or 40", f"\\boxed{{{gold}", f"#### {gold} #### 40"):
            verdict = "no answer" if extract_answer(text) is None else "right" if reward(text, gold) else "wrong"
            print(f"    {reward(text, gold):.0f}  {verdict:<10} {text}")


if __name__ == "__main__":
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGTERM), signal.SIG_DFL)  # `| head` ends it without a traceback
    main()
