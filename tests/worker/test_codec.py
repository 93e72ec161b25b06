"""The codec: exact both ways, and whatever else arrives is BadMessage and nothing worse."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.request import RequestId
from kvferry.worker import messages as m
from kvferry.worker.codec import MAX_MESSAGE_BYTES, VERSION, BadMessage, decode, encode
from kvferry.worker.messages import Envelope, NodeRef
from tests.fakes import ATTEMPT
from tests.worker.message_types import BODIES, any_envelope, conforms, envelopes

SENDER, RECEIVER = NodeRef("router", 3), NodeRef("decode-0", 7)
ACK = Envelope(SENDER, RECEIVER, 5, 4, m.Acknowledge(RequestId("r"), ATTEMPT, 16, True))


def parts_of(envelope: Envelope) -> list[Any]:
    """The envelope as the six plain parts that travel."""
    parts = msgpack.unpackb(encode(envelope)[1:])
    assert isinstance(parts, list)
    return parts


def bytes_of(parts: object) -> bytes:
    return bytes([VERSION]) + bytes(msgpack.packb(parts))


def decode_or_refuse(data: bytes) -> Envelope | None:
    """What the codec may do with any bytes: refuse them, or give exactly what the types say."""
    try:
        envelope = decode(data)
    except BadMessage:
        return None
    assert conforms(Envelope, envelope)
    assert encode(decode(encode(envelope))) == encode(envelope)
    return envelope


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body.__name__))
def test_every_message_comes_back_as_it_went(body: type[Any]) -> None:
    @settings(max_examples=30)
    @given(envelopes(body))
    def check(envelope: Envelope) -> None:
        again = decode(encode(envelope))
        assert again == envelope
        assert repr(again) == repr(envelope)  # an enum is no string, 1.0 is not 1
        assert conforms(Envelope, again)

    check()


def test_the_bytes_of_a_message_are_fixed() -> None:
    """A change of the format must come with another version byte."""
    plain = ["Acknowledge", ["router", 3], ["decode-0", 7], 5, 4, ["r", [1, 1], 16, True]]
    assert encode(ACK) == b"\x0a" + msgpack.packb(plain)
    assert decode(b"\x0a" + msgpack.packb(plain)) == ACK


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert decode_or_refuse(data) is None
    assert decode_or_refuse(bytes([VERSION]) + data) is None


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(JSON_LIKE)
def test_well_formed_msgpack_that_is_no_envelope_is_refused(value: object) -> None:
    assert decode_or_refuse(bytes_of(value)) is None


@given(st.sampled_from(BODIES), st.lists(JSON_LIKE, min_size=5, max_size=5))
def test_an_envelope_of_arbitrary_parts_is_refused_or_well_typed(
    body: type[Any], parts: list[Any]
) -> None:
    decode_or_refuse(bytes_of([body.__name__, *parts]))


@given(any_envelope(), st.data())
def test_a_truncated_message_is_refused(envelope: Envelope, data: st.DataObject) -> None:
    whole = encode(envelope)
    length = data.draw(st.integers(0, len(whole) - 1))
    assert decode_or_refuse(whole[:length]) is None


@given(any_envelope(), st.binary(min_size=1, max_size=9))
def test_a_message_with_something_behind_it_is_refused(envelope: Envelope, more: bytes) -> None:
    assert decode_or_refuse(encode(envelope) + more) is None


@given(any_envelope(), st.data())
def test_a_message_with_changed_bytes_is_refused_or_well_typed(
    envelope: Envelope, data: st.DataObject
) -> None:
    changed = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(changed))


def _places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Paths of all values inside nested lists."""
    found = [path] if path else []
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += _places(item, (*path, index))
    return found


@given(any_envelope(), st.data())
def test_a_value_of_another_kind_anywhere_is_refused_or_well_typed(
    envelope: Envelope, data: st.DataObject
) -> None:
    parts = parts_of(envelope)
    *way, last = data.draw(st.sampled_from(_places(parts)))
    holder = parts
    for index in way:
        holder = holder[index]
    holder[last] = data.draw(JSON_LIKE)
    decode_or_refuse(bytes_of(parts))


def test_every_other_version_is_refused_and_named() -> None:
    for version in {*range(256)} - {VERSION}:
        with pytest.raises(BadMessage, match=f"version {version}, this process speaks {VERSION}"):
            decode(bytes([version]) + encode(ACK)[1:])


@pytest.mark.parametrize("tag", ["Nothing", "", "Envelope", "NodeRef", "HeldItem", "x" * 10_000])
def test_an_unknown_message_is_refused_by_name(tag: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(bytes_of([tag, *parts_of(ACK)[1:]]))
    assert repr(tag[:60]) in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("num_parts", [0, 1, 5, 7])
def test_another_number_of_parts_is_refused(num_parts: int) -> None:
    parts = [*parts_of(ACK), None][:num_parts]
    with pytest.raises(BadMessage):
        decode(bytes_of(parts))


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ((3,), True, "seq: bool"),
        ((3,), 5.0, "seq: float"),
        ((4,), "4", "heard: str"),
        ((1,), ["router"], "sender: 1, wanted 2 fields"),
        ((1,), ["router", 3, 4], "sender: 3, wanted 2 fields"),
        ((2, 1), None, "receiver.epoch: NoneType"),
        ((2, 0), b"decode-0", "receiver.node_id: bytes"),
        ((5,), {"request_id": "r"}, "Acknowledge: dict"),
        ((5, 1), [1], "Acknowledge.attempt: 1, wanted 2 fields"),
        ((5, 3), 1, "Acknowledge.hand_off_received: int"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    place: tuple[int, ...], value: object, named: str
) -> None:
    parts = parts_of(ACK)
    holder = parts
    for index in place[:-1]:
        holder = holder[index]
    holder[place[-1]] = value
    with pytest.raises(BadMessage) as caught:
        decode(bytes_of(parts))
    assert str(caught.value).startswith(named)


def test_an_unknown_enum_value_is_refused() -> None:
    cancel = Envelope(SENDER, RECEIVER, 1, 1, m.CancelLeg(RequestId("r"), ATTEMPT, m.Leg.DECODE))
    wrong: object
    for wrong in ("sideways", 3, None, [], {}, b"decode"):
        parts = parts_of(cancel)
        parts[5][2] = wrong
        with pytest.raises(BadMessage, match=r"CancelLeg\.leg"):
            decode(bytes_of(parts))


def test_a_token_that_is_no_integer_is_refused() -> None:
    item = m.TokenEvent(RequestId("r"), ATTEMPT, 0, 0, (1, 2))
    event = Envelope(SENDER, RECEIVER, 1, 1, m.TokenEvents((item,)))
    for wrong in (1.0, True, "1", None, [1]):
        parts = parts_of(event)
        parts[5][0][0][4][1] = wrong
        with pytest.raises(BadMessage, match="token_ids"):
            decode(bytes_of(parts))


@pytest.mark.parametrize("pair", [[], ["free"], ["free", 1, 2], "free", {"free": 1}])
def test_a_pair_of_another_length_is_refused(pair: object) -> None:
    report = m.AuditReport(1, 4, 32, (("free", 64),), (), ())
    parts = parts_of(Envelope(SENDER, RECEIVER, 1, 1, report))
    parts[5][3][0] = pair
    with pytest.raises(BadMessage, match=r"AuditReport\.counts"):
        decode(bytes_of(parts))


def test_a_whole_number_serves_as_a_float() -> None:
    beat = Envelope(SENDER, RECEIVER, 0, 0, m.WorkerHeartbeat(m.LoadReport(), 2.0))
    parts = parts_of(beat)
    parts[5][1] = 2
    body = decode(bytes_of(parts)).body
    assert isinstance(body, m.WorkerHeartbeat)
    assert type(body.step_age_s) is float and body.step_age_s == 2.0


MALFORMED = {
    "nothing": b"",
    "version only": b"\x01",
    "deep arrays": b"\x01" + b"\x91" * 200_000,
    "deep maps": b"\x01" + b"\x81\xa1a" * 200_000,
    "deep but whole": b"\x01" + b"\x91" * 400 + b"\x01",
    "deep body": b"\x01\x96" + encode(ACK)[2:-1] + b"\x91" * 100_000,
    "array that claims four billion items": b"\x01\xdd\xff\xff\xff\xff",
    "string that claims four billion bytes": b"\x01\xdb\xff\xff\xff\xff",
    "map with an array as key": b"\x01\x81\x90\x01",
    "map with an integer as key": b"\x01\x81\x01\x01",
    "text that is not UTF-8": b"\x01\x96\xa2\xff\xfe",
    "never used byte": b"\x01\xc1",
    "extension": b"\x01\xd4\x05\x00",
    "time stamp": b"\x01\xd6\xff\x00\x00\x00\x00",
    "time stamp of a wrong size": b"\x01\xd5\xff\x00\x00",
    "time stamp out of range": b"\x01\xd7\xff" + b"\xff" * 8,
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_hostile_bytes_are_refused(name: str) -> None:
    with pytest.raises(BadMessage):
        decode(MALFORMED[name])


def test_a_message_beyond_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(BadMessage, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        decode(bytes([VERSION]) + bytes(MAX_MESSAGE_BYTES))
