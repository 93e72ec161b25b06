"""Files that were damaged or made to hurt end in ``ModelError``: soon, and in little memory."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kvferry.engine.chat import ChatTemplate
from kvferry.engine.models.checkpoint import MAX_CONFIG_BYTES, read_object, shown
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel, ModelError, UnsupportedModel
from kvferry.engine.models.loading import load_model
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.convert import convert_gguf
from kvferry.engine.weights.files import no_progress
from kvferry.engine.weights.gguf_file import read_gguf
from kvferry.engine.weights.reader import open_weights
from kvferry.engine.weights.store import ModelStore
from tests.engine.hub_folders import SHARDS, write_repository
from tests.engine.tiny_gguf import write_tiny_gguf

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = (*SMALL, "chat_template.jinja", "model.safetensors")


@cache
def whole_model(sharded: bool = False) -> dict[str, bytes]:
    """The files of a small model that loads."""
    with TemporaryDirectory() as scratch:
        folder = write_repository(Path(scratch) / "m", sharded=sharded)
        return {f.name: f.read_bytes() for f in folder.iterdir()}


@cache
def whole_gguf(sentencepiece: bool) -> bytes:
    with TemporaryDirectory() as scratch:
        write_tiny_gguf(Path(scratch) / "m.gguf", sentencepiece=sentencepiece)
        return (Path(scratch) / "m.gguf").read_bytes()


@contextmanager
def folder_with(files: dict[str, bytes]) -> Iterator[Path]:
    with TemporaryDirectory() as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        yield Path(scratch)


def open_everything(folder: Path) -> None:
    """Every reader that start-up runs over a folder."""
    ModelStore(folder / "cache").resolve(path=folder)
    ModelConfig.from_folder(folder)
    Tokenizer(folder)
    ChatTemplate.from_folder(folder)
    load_model(folder, "float32")


def convert(content: bytes) -> None:
    with folder_with({"m.gguf": content}) as folder:
        (folder / "out").mkdir()
        origin = {"gguf_sha256": "0" * 64}
        convert_gguf(folder / "m.gguf", folder / "out", "m", origin, no_progress)


def test_the_whole_ones_open() -> None:
    for sharded in (False, True):
        with folder_with(whole_model(sharded)) as folder:
            open_everything(folder)
    for sentencepiece in (False, True):
        convert(whole_gguf(sentencepiece))


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A cut, or a few bytes or a number overwritten, somewhere."""
    share = draw(st.floats(0, 1, exclude_max=True))
    if draw(st.booleans()):
        return lambda content: content[: int(len(content) * share)]
    if draw(st.booleans()):
        share = share**4  # headers stand first
    new = draw(
        st.binary(min_size=1, max_size=8)
        | st.sampled_from([2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]).map(
            lambda n: struct.pack("<Q", n)
        )
        | st.sampled_from([b"-1", b"1e999", b"NaN", b"[[[[", b'{"a":', b"null", b"99999999999"])
    )

    def overwrite(content: bytes) -> bytes:
        at = int(len(content) * share)
        return content[:at] + new + content[at + len(new) :]

    return overwrite


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(FILES), edit=edits())
def test_an_edited_folder_opens_or_is_a_model_error(
    name: str, edit: Callable[[bytes], bytes]
) -> None:
    files = whole_model()
    with folder_with(files | {name: edit(files[name])}) as folder:
        try:
            open_everything(folder)
        except ModelError:
            pass


@settings(deadline=None, max_examples=200)
@given(edit=edits(), sentencepiece=st.booleans())
def test_an_edited_gguf_converts_or_is_a_model_error(
    edit: Callable[[bytes], bytes], sentencepiece: bool
) -> None:
    try:
        convert(edit(whole_gguf(sentencepiece)))
    except ModelError:
        pass


CONFIG: dict[str, Any] = json.loads(whole_model()["config.json"])
KEYS = sorted(
    {*CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim"}
    | {"use_sliding_window", "max_window_layers", "partial_rotary_factor", "attention_bias"}
    | {"quantization_config", "mlp_bias"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**9, 10**12, 10**15, 2**63, -(2**63), 10**400, -1, 0, 1, 3])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=500)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@example(changes={"layer_types": 7})
@example(changes={"rms_norm_eps": 10**400})
def test_any_configuration_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        found = ModelConfig.from_dict(CONFIG | changes, name="m", revision="r")
    except ModelError as error:
        assert len(str(error)) < 1000
    else:
        assert found.num_layers <= 2**12
        assert found.head_dim % 2 == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, wanted at most"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"hidden_size": 10**400}, "hidden_size is an integer of 1329 bits"),
        ({"head_dim": 7}, "head_dim is 7, wanted an even number"),
        ({"head_dim": 0}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": [1e-5]}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"eos_token_id": list(range(10**5))}, "eos_token_id is a list of 100000"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"layer_types": 3}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
    ],
)
def test_a_number_beyond_reason_is_named_with_its_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DamagedModel, match=named):
        ModelConfig.from_dict(CONFIG | changes, name="m", revision="r")


def test_a_name_out_of_a_file_is_printed_short_and_on_one_line() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        hostile = "\x1b[2J\n" + "x" * 10**6
        ModelConfig.from_dict(CONFIG | {"architectures": [hostile]}, name="m", revision="r")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    assert shown(["x"] * 100) == "a list of 100"


@pytest.mark.parametrize("file", SMALL)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b'{"eos_token_id": 1, "eos_token_id": 2}',
        b'{"rms_norm_eps": NaN}',
        b'{"a": 1e999}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 10**5 + b"}",
        b"\xff\xfe{}",
        b"[]",
        b"",
    ],
    ids=["deep list", "deep object", "double", "nan", "inf", "-inf", "huge", "utf-16", "[]", ""],
)
def test_json_that_is_not_plain_is_refused_by_the_file(file: str, content: bytes) -> None:
    named = pytest.raises(ModelError, match=re.escape(file))
    with folder_with(whole_model() | {file: content}) as folder, named:
        open_everything(folder)


@pytest.mark.parametrize("file", [*FILES, "model.safetensors.index.json", "kvferry-manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_what_is_no_regular_file_is_refused_and_does_not_block(file: str, kind: str) -> None:
    files = {name: content for name, content in whole_model().items() if name != file}
    with folder_with(files) as folder:
        if kind == "pipe":
            os.mkfifo(folder / file)
        elif kind == "folder":
            (folder / file).mkdir()
        else:
            (folder / file).symlink_to("/dev/zero" if kind == "device" else file)
        with pytest.raises(ModelError, match=re.escape(file)):
            open_everything(folder)


def test_a_gguf_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf"):
        ModelStore(tmp_path / "cache").resolve(path=tmp_path / "m.gguf")


def test_a_file_larger_than_its_limit_is_not_read() -> None:
    files = whole_model()
    for name in SMALL:
        with folder_with(files) as folder:
            os.truncate(folder / name, 1 << 33)  # sparse
            with pytest.raises(DamagedModel, match=f"{name}: larger than"):
                open_everything(folder)
    assert MAX_CONFIG_BYTES < 1 << 33


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def safetensors(header: object, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        safetensors({}, b"", length=2**63),
        safetensors({}, b"", length=2**40),
        safetensors({}, b"", length=99),
        safetensors({"t": TENSOR}, bytes(15)),
        safetensors({"t": TENSOR}, bytes(17)),
        safetensors({"t": TENSOR | {"data_offsets": [0, 2**62]}}),
        safetensors({"t": TENSOR | {"data_offsets": [-16, 0]}}),
        safetensors({"t": TENSOR | {"data_offsets": [16, 0]}}),
        safetensors({"t": TENSOR | {"data_offsets": ["0", "16"]}}),
        safetensors({"t": TENSOR | {"data_offsets": 16}}),
        safetensors({"t": TENSOR | {"shape": [2**40, 2**40]}}),
        safetensors({"t": TENSOR | {"shape": [2, -2]}}),
        safetensors({"t": TENSOR | {"shape": [2, 2.0]}}),
        safetensors({"t": TENSOR | {"shape": [True, 4]}}),
        safetensors({"t": TENSOR | {"shape": [1] * 10**5}}),
        safetensors({"t": TENSOR | {"dtype": "F8_E9"}}),
        safetensors({"t": TENSOR | {"dtype": ["F32"]}}),
        safetensors({"t": 7}),
        safetensors({"t": TENSOR, "u": TENSOR}),
        safetensors({"t": TENSOR, "u": TENSOR | {"data_offsets": [8, 24]}}, bytes(24)),
        safetensors({"t": TENSOR, "u": TENSOR | {"data_offsets": [20, 36]}}, bytes(36)),
        safetensors(b"[" * 10**5),
        safetensors(b'{"t": ' + json.dumps(TENSOR).encode() + b', "t": {}}'),
        b"\x80\x04\x95" + bytes(100),
        b"",
    ],
)
def test_a_safetensors_header_that_does_not_add_up_is_damaged(content: bytes) -> None:
    with folder_with(whole_model() | {"model.safetensors": content}) as folder:
        with pytest.raises(DamagedModel, match=r"model\.safetensors"):
            open_weights(folder)
        with pytest.raises(DamagedModel, match=r"model\.safetensors"):
            ModelConfig.from_folder(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64])
def test_a_weight_of_another_type_is_refused_by_its_name(dtype: torch.dtype) -> None:
    name = "model.norm.weight"
    content = save({name: torch.zeros(4).to(dtype)})
    with folder_with({"model.safetensors": content}) as folder, open_weights(folder) as weights:
        assert weights.shape(name) == (4,)
        with pytest.raises(UnsupportedModel, match=r"stored as (I8|I64|F8_E4M3|F64), wanted"):
            weights.tensor(name)


@pytest.mark.parametrize(
    "shard",
    [
        *("../x.safetensors", "/etc/passwd", "", ".", "..", "a\0.safetensors", 7, None, ["x"]),
        *("model.safetensors.index.json", "pytorch_model-00001-of-00002.bin", "no.safetensors"),
    ],
)
def test_an_index_names_shards_beside_it_and_nothing_else(shard: object) -> None:
    files = whole_model(sharded=True)
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"]["model.norm.weight"] = shard
    changed = files | {"model.safetensors.index.json": json.dumps(index).encode()}
    with folder_with(changed) as folder, pytest.raises(DamagedModel):
        open_weights(folder)


def test_shards_that_are_links_to_each_other_are_damaged() -> None:
    with folder_with(whole_model(sharded=True)) as folder:
        for one, other in (SHARDS, SHARDS[::-1]):
            (folder / one).unlink()
            (folder / one).symlink_to(other)
        with pytest.raises(DamagedModel, match="model-0000"):
            open_everything(folder)


def test_a_folder_of_pickles_is_refused_unopened() -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"cos\nsystem\n(S'exit 1'\ntR."}
    with folder_with(files) as folder:
        message = r"pytorch_model\.bin may hold code and is never opened"
        with pytest.raises(DamagedModel, match=message):
            ModelStore(folder / "cache").resolve(path=folder)


def test_code_in_a_folder_is_not_run() -> None:
    files = dict(whole_model())
    config = json.loads(files["config.json"])
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_tiny.Tiny"}
    assert b"SystemExit" in files["modeling_tiny.py"]
    with folder_with(files | {"config.json": json.dumps(config).encode()}) as folder:
        open_everything(folder)
        assert "modeling_tiny" not in sys.modules


@pytest.mark.parametrize(
    "template",
    [
        *("{{" * 10**5, "{% if x %}" * 10**4, "{{ " + "(" * 10**4, "{{ x." + "y." * 10**5),
        *("(" * 10**5, "{{ " + "-" * 10**5 + "1 }}", "x" * (2 << 20)),
    ],
)
def test_a_template_that_cannot_be_compiled_is_damaged_or_plain(template: str) -> None:
    with folder_with({"chat_template.jinja": template.encode()}) as folder:
        try:
            ChatTemplate.from_folder(folder)
        except DamagedModel as error:
            assert "chat" in str(error)


class Gguf:
    """Bytes of a GGUF file, piece by piece."""

    U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10

    def __init__(self, tensors: int = 0, keys: int = 0) -> None:
        self.content = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)

    def key(self, name: str, kind: int, value: bytes) -> Gguf:
        self.content += struct.pack("<Q", len(name)) + name.encode()
        self.content += struct.pack("<I", kind) + value
        return self

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Gguf:
        self.content += struct.pack("<Q", len(name)) + name.encode()
        self.content += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        return self


def array(kind: int, number: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, number) + data


HUGE = struct.pack("<Q", 2**63)
GGUFS = {
    "tensor count": Gguf(tensors=2**60).content + bytes(99),
    "key count": Gguf(keys=2**60).content + bytes(99),
    "key length": Gguf(keys=1).content + HUGE + bytes(99),
    "string length": Gguf(keys=1).key("a", Gguf.STRING, HUGE).content + bytes(99),
    "array count": Gguf(keys=1).key("a", Gguf.ARRAY, array(Gguf.U8, 2**63)).content + bytes(99),
    "strings": Gguf(keys=1).key("a", Gguf.ARRAY, array(Gguf.STRING, 2**62)).content + bytes(99),
    "array of arrays": Gguf(keys=1).key("a", Gguf.ARRAY, array(Gguf.ARRAY, 1)).content + bytes(99),
    "value type": Gguf(keys=1).key("a", 77, bytes(99)).content,
    "alignment": Gguf(keys=1).key("general.alignment", Gguf.U64, struct.pack("<Q", 2**62)).content,
    "alignment 0": Gguf(keys=1).key("general.alignment", Gguf.U32, bytes(4)).content,
    "dimensions": Gguf(1).tensor("t", (1,) * 9, 0, 0).content + bytes(99),
    "shape": Gguf(1).tensor("t", (2**63, 2**63, 2**63), 0, 0).content + bytes(99),
    "zero": Gguf(1).tensor("t", (0, 4), 0, 0).content + bytes(99),
    "offset": Gguf(1).tensor("t", (4,), 0, 2**63).content + bytes(99),
    "row": Gguf(1).tensor("t", (5,), 8, 0).content + bytes(99),
    "overlap": Gguf(2).tensor("t", (8,), 0, 0).tensor("u", (8,), 0, 16).content + bytes(99),
    "twice": Gguf(2).tensor("t", (8,), 0, 0).tensor("t", (8,), 0, 32).content + bytes(99),
    "utf-8": Gguf(keys=1).key("a", Gguf.STRING, struct.pack("<Q", 1) + b"\xff").content,
    "version": b"GGUF" + struct.pack("<IQQ", 2**31, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("what", GGUFS)
def test_a_gguf_header_that_announces_the_impossible_is_refused_at_once(what: str) -> None:
    with (
        folder_with({"m.gguf": GGUFS[what]}) as folder,
        pytest.raises(ModelError, match=r"m\.gguf"),
    ):
        read_gguf(folder / "m.gguf")


def test_a_double_key_behind_many_is_found_without_comparing_all(tmp_path: Path) -> None:
    keys = ", ".join(f'"k{i}": 0' for i in range(200_000))  # comparing all would take hours
    (tmp_path / "config.json").write_text(f'{{{keys}, "k9": 1}}')
    with pytest.raises(DamagedModel, match="key 'k9' stands twice"):
        read_object(tmp_path / "config.json")


def test_one_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", extra={"split.count": 3})
    with pytest.raises(UnsupportedModel, match="one part of 3"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.rope.freq_base": float("nan")},
        {"llama.attention.layer_norm_rms_epsilon": float("inf")},
        {"tokenizer.ggml.bos_token_id": 2**32 - 1},
        {"llama.block_count": 2**32 - 1},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": "8"},
    ],
)
def test_values_of_a_gguf_are_held_to_the_same_bounds(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelError):
        convert((tmp_path / "m.gguf").read_bytes())


def metadata_bomb(path: Path) -> None:
    """48 MiB of metadata in arrays of bytes, each element of which becomes a Python object."""
    number = 4 << 20
    with path.open("wb") as out:
        out.write(Gguf(keys=12).content)
        for at in range(12):
            part = Gguf().key(f"a{at}", Gguf.ARRAY, array(Gguf.U8, number)).content[24:]
            out.write(part + np.zeros(number, np.uint8).tobytes())


@pytest.mark.parametrize("kind", ["metadata", "padding"])
def test_memory_stays_within_a_small_multiple_of_the_header(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata_bomb(path)
    if kind == "padding":
        path.write_bytes(Gguf(keys=1).key("a", Gguf.STRING, struct.pack("<Q", 1 << 34)).content)
        os.truncate(path, 1 << 35)  # sparse
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from kvferry.engine.weights.gguf_file import read_gguf\n"
        "from kvferry.engine.models.errors import ModelError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_gguf(Path(sys.argv[1]))\n"
        "except ModelError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 12 * 48 * 1024  # KiB
