"""Every mistake of a row in plain words: nothing of pydantic's own reaches a user (R41)."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from shared.validation import fault_of


class Row(BaseModel):
    box: list[float] = Field(min_length=4, max_length=4)
    role: Literal["user", "system"] = "user"
    name: str = ""
    number: int = Field(default=0, le=9)


ROWS = TypeAdapter(list[Row])


@pytest.mark.parametrize(
    ("text", "what", "found", "wanted"),
    [
        ("", "not JSON", "nothing", "one JSON object"),
        ("[1,\n2", "not JSON", "EOF while parsing a list at line 2 column 1: [1, 2", "one JSON object"),
        ("{}", "the file is wrong", "{}", "a list"),
        ("[1]", "0 is wrong", "1", "an object with keys"),
        ("[{}]", "0.box is missing", "no keys", "a value for 0.box"),
        ('[{"bbox": [], "id": 1}]', "0.box is missing", "only bbox, id", "a value for 0.box"),
        ('[{"box": [1, 2]}]', "0.box is wrong", "[1, 2]", "at least 4 items"),
        ('[{"box": [1, 2, 3, 4, 5]}]', "0.box is wrong", "[1, 2, 3, 4, 5]", "at most 4 items"),
        ('[{"box": [1, 2, 3, "x"]}]', "0.box.3 is wrong", "'x'", "a number"),
        ('[{"box": [1, 2, 3, 4], "role": "usr"}]', "0.role is wrong", "'usr'", "'user' or 'system'"),
        ('[{"box": [1, 2, 3, 4], "name": 3}]', "0.name is wrong", "3", "a text"),
        ('[{"box": [1, 2, 3, 4], "number": 10}]', "0.number is wrong", "10", "less than or equal to 9"),
    ],
)
def test_a_fault_in_words(text: str, what: str, found: str, wanted: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ROWS.validate_json(text)
    fault = fault_of(caught.value.errors(include_url=False)[0], whole="the file")
    assert (fault.what, fault.found, fault.wanted) == (what, found, wanted)
