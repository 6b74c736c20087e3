"""The page of shaded tokens: well-formed, escaped, one span per token."""
from html.parser import HTMLParser

from assets.pictures import tokens_page

VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Checks that tags nest, and gathers the spans with their text and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.spans, self.tags = [], [], set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "span":
            self.spans.append(dict(attrs) | {"text": ""})

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["span"]:
            self.spans[-1]["text"] += data


HOSTILE = '<script>alert("&amp;")</script>'
TOKENS = [(HOSTILE, 0.5, 0.2, 3.0, True, False), ("</span>", 1.5, 0.0, 0.0, False, True),
          ("\n", 0.0, 2.0, 1.0, True, True), ('"\'', 0.1, 0.1, 0.1, False, False),
          ("", 0.0, 0.0, 0.0, False, False), ("\ufffd", 1e-9, 1e-9, 1e-9, False, False)]


def test_one_escaped_span_per_token():
    page = Reader(tokens_page([(HOSTILE, [(1.0, 0.7, TOKENS), (0.0, -1.4, TOKENS[:2])]), ("plain", [])]))
    assert [span["text"].replace("\u21b5", "") for span in page.spans] == [t[0] for t in TOKENS + TOKENS[:2]]
    assert [span["class"] for span in page.spans[:4]] == ["ets", "gmts", "both", ""]
    assert "script" not in page.tags and HOSTILE.__repr__() in page.spans[0]["title"]
    assert "entropy 0.500, GMTS score 0.200, exact norm 3.000" in page.spans[0]["title"]


def test_shades_are_shares_of_the_largest_value():
    page = Reader(tokens_page([("q", [(1.0, 0.7, TOKENS)])]))
    assert page.spans[1]["style"] == "--e:0.80;--g:0.00;--n:0.00" and page.spans[0]["style"].endswith("--n:0.80")


def test_page_stands_alone():
    page = tokens_page([])
    assert Reader(page).spans == [] and "http" not in page and "src=" not in page
