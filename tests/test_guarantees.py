"""Every test and every page that docs/guarantees.md names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", PAGE.read_text())


@cache
def definitions(file):
    """The names in a test file as pytest builds them, "Class" and "Class::test" and "test"."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def rows():
    """The cells of every row of every table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("test", sorted(set(NAMED)))
def test_a_test_that_is_named(test):
    file, _, name = test.partition("::")
    assert (ROOT / file).is_file()
    assert not name or name in definitions(file)


def test_every_name_is_recognised():
    """None is written in a way that the test above does not see."""
    assert len(NAMED) == PAGE.read_text().count("tests/") > 100


def test_every_row_says_what_it_has_to():
    widths = [len(row) for row in rows()]
    assert set(widths) == {2, 3}
    assert all(all(row) for row in rows())


def test_every_fault_has_a_test_or_a_reason():
    faults = [row for row in rows() if len(row) == 3 and row[0] not in {"fault", "---"}]
    assert len(faults) > 60
    bare = [fault for fault, _, answer in faults if "`tests/" not in answer and "cannot occur" not in answer]
    assert bare == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", PAGE.read_text()))))
def test_a_page_that_is_linked(link):
    assert (PAGE.parent / link).is_file()
