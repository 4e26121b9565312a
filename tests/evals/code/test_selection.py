"""Which code is selected from an answer, and by which rule."""

import time

from evals.code.selection import target_function

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """The sum of a and b."""'
HELPER = "import math\n\nclass Helper:\n    def one(self):\n        return 1\n\n    def two(self):\n        return 2"
TESTS = "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n    assert add(0, 0) == 0"
DOCUMENTED = 'def add(a, b):\n    """The sum.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b'
BARE = 'def add(a, b):\n    """The sum.\n\n```\nadd(1, 2)\n```\n"""\n    return a + b'
METHOD_FIRST = "class Sum:\n    def add(self, a, b):\n        return None\n\n" + ADD
WRONG, MORE = ADD.replace("+", "-"), ADD + " + 0"
CLASS = "class S:\n    def add(self):\n        return 0"
CACHED = "from functools import lru_cache\n\n@lru_cache\n" + ADD
IN_DOCSTRING = 'def helper():\n    """\n    def add(a, b): wrong\n    """\n    return 1\n\n' + ADD


def fenced(code: str, tag: str = "python", fence: str = "```") -> str:
    return f"{fence}{tag}\n{code}\n{fence}\n"


BLOCKS = {  # the rule "block": name: (answer, code)
    "one block": (fenced(ADD), ADD),
    "in the second block": ("Sure!\n" + fenced(HELPER) + "then\n" + fenced(ADD), ADD),
    "no tag": (fenced(ADD, ""), ADD),
    "the end is missing": ("```python\n" + ADD, ADD),
    "an end is missing before it": ("```python\n" + HELPER + "\n" + fenced(ADD), ADD),
    "four backticks, ended by three": ("````python\n" + ADD + "\n```\n", ADD),
    "tildes around backticks": ("~~~\n" + fenced(ADD) + "~~~\n", ADD),
    "indented in a list": (
        "1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
        ADD,
    ),
    "longer tests after it": (fenced(ADD) + "and tests:\n" + fenced(TESTS), ADD),
    "tests before it": (fenced(TESTS) + fenced(ADD), ADD),
    "a comment that names it": (fenced("# def add(a, b): see below\nx = 1") + fenced(ADD), ADD),
    "prose that names it": (
        "I write def add(a, b): as asked.\n" + fenced(ADD) + "def add is done.",
        ADD,
    ),
    "a decorator": (fenced(CACHED), CACHED),
    "a method before the function": (fenced(METHOD_FIRST), METHOD_FIRST),
    "its name in a docstring": (fenced(IN_DOCSTRING), IN_DOCSTRING),
    "a fence in its docstring": (fenced(DOCUMENTED), DOCUMENTED),
    "a fence without a tag in its docstring": (fenced(BARE) + "Done.\n" + fenced(TESTS), BARE),
    "text before the fence": ("Here: " + fenced(ADD) + "Done", ADD),
    "the end glued to the code": ("```python\n" + ADD + "```\nDone", ADD),
    "a draft that is thought": ("<think>\n" + fenced(WRONG) + "</think>\n" + fenced(ADD), ADD),
    "a signature first": (fenced(STUB) + "Now in full:\n" + fenced(ADD), ADD),
    "a signature last": (
        fenced(ADD) + "It keeps the signature\n" + fenced("def add(a, b):\n    pass"),
        ADD,
    ),
    "not implemented first": (
        fenced("def add(a, b):\n    raise NotImplementedError") + fenced(ADD),
        ADD,
    ),
    "a corrected version": (fenced(WRONG) + "Wait, no:\n" + fenced(ADD), ADD),
    "a correction that does not parse": (
        fenced(ADD) + "or\n" + fenced("def add(a, b)\n    return"),
        ADD,
    ),
    "an import in an earlier block": (
        fenced("import math") + fenced(ADD),
        ADD,
    ),  # the card takes one
    "a form feed and U+2028 in a string": (
        fenced(ADD + "  # \f \u2028 x"),
        ADD + "  # \f \u2028 x",
    ),
    "a fence in a comment": (fenced(ADD + "\n# ```\nx = 1"), ADD + "\n# ```\nx = 1"),
}
TEXTS = {  # the rule "text": name: (answer, code)
    "no block": (ADD + "\n\nThat is all.", ADD + "\n"),
    "a cut function after it": (ADD + "\ndef cut(x, y", ADD),
    "a cut string after it": (ADD + '\ntext = """cut', ADD),
    "prose before it": ("Sure: add it.\nimport math\n" + ADD + "\nDone!", "import math\n" + ADD),
    "empty": ("", ""),
    "a signature alone": (fenced(STUB), fenced(STUB)),
    "a class alone": (fenced(CLASS),) * 2,
    "quoted": ("> ```python\n> " + ADD.replace("\n", "\n> ") + "\n> ```\n",) * 2,
    "no block defines it": (fenced(HELPER) + fenced("x = 1"),) * 2,
    "no block, after thinking": ("<think>" + fenced(ADD) + "</think>" + ADD, ADD),
}


def test_the_last_block_that_defines_the_function():
    for name, (answer, code) in BLOCKS.items():
        assert target_function(answer, "add") == (code, "block"), name
        assert target_function(answer.replace("\n", "\r\n"), "add") == (code, "block"), name


def test_else_the_longest_program_or_the_whole_text():
    for name, (answer, code) in TEXTS.items():
        assert target_function(answer, "add") == (code, "text"), name


def test_endless_answers_are_read_in_time():
    """Seconds; minutes if every pair of fences, or every part of a text that is no Python, were parsed."""
    began_s = time.process_time()
    noise = "".join(f"def word {i} of no Python(\n" for i in range(4000))
    for answer in ("```python\ndef add(a, b):\n" * 150, "```\n" * 500, noise, "(" * 100_000):
        assert target_function(answer, "add")[1] == "text"
    assert target_function(noise, "add")[0] == noise
    assert time.process_time() - began_s < 60
