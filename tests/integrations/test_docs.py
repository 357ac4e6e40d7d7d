"""Every test and example that docs/integrations.md names is there, and every row of what composes has one."""

import re
from pathlib import Path

import pytest
from test_guarantees import definitions

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", TEXT)))


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_is_named(test):
    file, _, name = test.partition("::")
    assert (ROOT / file).is_file()
    assert not name or name in definitions(file)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:examples|benchmarks)/\w+\.py)`", TEXT))))
def test_a_file_that_is_named(path):
    assert (ROOT / path).is_file()


def test_every_row_of_what_composes_has_a_test():
    tables = TEXT.split("| tested by |\n")[1:]
    rows = [line for table in tables for line in table.split("\n\n")[0].splitlines()[1:]]
    assert len(rows) >= 9
    assert [row for row in rows if "`tests/" not in row] == []
