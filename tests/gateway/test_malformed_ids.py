"""Ids, tool choices and images that no client of ours would send: refused, never an internal error."""

from __future__ import annotations

import io

import pytest
from PIL import Image as Pillow

from afield.gateway import images, turn_ids
from afield.gateway.api_error import ApiError
from afield.gateway.dialects import request_options
from afield.interfaces import Image


@pytest.mark.parametrize("turn", ["t" + "9" * 5000, "t\u0661", "t", "t-1"])
def test_malformed_ids_name_no_turn(turn: str) -> None:
    tag = turn_ids.response_id("s-1", "t1").removesuffix("_t1")
    assert turn_ids.turn_of_response(f"{tag}_{turn}", "s-1") is None
    assert turn_ids.turn_of_id(f"msg_{turn}_0") is None


def test_allowed_tool_without_type_gets_400() -> None:
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": [], "name": "a"}]}}
    with pytest.raises(ApiError, match="names no tool"):
        request_options.openai_choice(given, nested=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_gets_400() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 3
    written = io.BytesIO()
    Pillow.new("RGB", (4, 4), "red").save(written, "JPEG", exif=exif.tobytes())
    whole = written.getvalue()
    at = whole.index(b"Exif\0\0") + 6
    for place in range(at, at + len(exif.tobytes())):
        for value in (0x00, 0x05, 0x0C, 0xFF):
            data = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                images.decoded(Image(digest="d", media_type="image/jpeg", data=data), "messages[0]")
            except ApiError as refused:
                assert refused.status == 400
