"""What the README says about the repository: files, lines and links."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_lines_of_the_five_files():
    table = dict(re.findall(r"\[(\w+\.py)\]\(\1\) \| (\d+) \|", README))
    assert table == {name: str(len((ROOT / name).read_text(encoding="utf-8").splitlines()))
                     for name in ("verify.py", "model.py", "rollout.py", "gmts.py", "train.py")}


def test_no_row_of_a_table_waits_for_its_figures():
    assert not re.search(r"\bTRL[A-Z]{4,}|@[A-Z0-9]+@", README)


def test_links_resolve():
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", README, re.M)}
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert len(links) > 5
    for link in links:
        assert link[1:] in anchors if link.startswith("#") else (ROOT / link).exists(), link


def test_flags_in_commands_exist():
    import train
    flags = {f"--{name}" for name in train.Config.__dataclass_fields__}
    commands = re.findall(r"python train\.py((?:\\\n|[^`\n|])*)", README)
    assert len(commands) > 5
    for command in commands:
        assert set(re.findall(r"--\w+", command)) - {"--help"} <= flags, command
