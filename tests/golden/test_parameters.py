"""Every sampling parameter: the same tokens colocated, disaggregated, and from a plain loop.

The plain loop computes the whole sequence for each token on a pool of its own and knows neither
scheduler nor hand-off. Prompts, chunks and blocks are of odd sizes; weights are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch

from kvferry.cluster.routed_request import RequestEnd, RoutedRequest, StopMatch
from kvferry.cluster.session import Session, SessionItem, TextDelta
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import random_model
from kvferry.engine.request import (
    FinishReason,
    InvalidRequest,
    RequestId,
    RequestSpec,
    SamplingParams,
    TokenBias,
)
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.logprobs import logprobs_of
from kvferry.engine.sampling.sampler import sample
from kvferry.engine.stopping import Finish, finish_after
from kvferry.engine.tokenizer import Tokenizer
from tests.engine.generation import model_config
from tests.engine.paged_model import PagedSequences
from tests.engine.tiny_tokenizers import byte_level
from tests.fakes import RecordingListener
from tests.golden.cluster import RealCluster

BLOCK_SIZE = 8
LENGTHS = (1, 7, 8, 9, 21, 40)
BASE = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaModel:
    return random_model(model_config(vocab_size=tokenizer.vocab_size), 5, "float32")


@dataclass
class TextListener(RecordingListener):
    """A front door's session, whose items are kept; ``text`` is what a client sees."""

    session: Session | None = None
    text: str = ""

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        """Offer the tokens to the session; keep what it accepts."""
        assert self.session is not None
        match = self.session.on_tokens(run, now)
        super().on_tokens(run if match is None else run.first(match.num_tokens), now)
        return match

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """Keep the end."""
        assert self.session is not None
        self.session.on_end(request, end, now)
        super().on_end(request, end, now)

    def emit(self, item: SessionItem) -> None:
        """Keep the text."""
        if isinstance(item, TextDelta):
            self.text += item.text


@dataclass
class Arrangement:
    """A cluster, its tokenizer, and requests that are served one after the other or together."""

    cluster: RealCluster
    tokenizer: Tokenizer
    names: Iterator[int] = field(default_factory=count)

    def submit(self, spec: RequestSpec) -> TextListener:
        """Start a request under a name of its own."""
        named = replace(spec, request_id=RequestId(f"r{next(self.names)}"))
        listener = TextListener()
        detokenizer = IncrementalDetokenizer(self.tokenizer, spec.sampling.skip_special_tokens)
        listener.session = Session(named, detokenizer, listener.emit)
        self.cluster.submit(named, listener)
        return listener

    def serve(self, *specs: RequestSpec) -> list[TextListener]:
        """Serve requests together."""
        listeners = [self.submit(spec) for spec in specs]
        self.cluster.run_until_ended()
        return listeners


ARRANGEMENTS = {
    "disaggregated": {"num_prefill": 1, "num_decode": 1},
    "colocated": {"num_prefill": 0, "num_decode": 0, "num_colocated": 1},
}


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def arrangement(
    request: pytest.FixtureRequest, model: LlamaModel, tokenizer: Tokenizer
) -> Iterator[Arrangement]:
    counts: dict[str, Any] = ARRANGEMENTS[request.param]
    cluster = RealCluster(model=model, block_size=BLOCK_SIZE, **counts)
    cluster.run(1.5)
    yield Arrangement(cluster, tokenizer)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


def request_of(length: int, sampling: SamplingParams, eos: tuple[int, ...] = ()) -> RequestSpec:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, 250, (length,), generator=generator).tolist()
    return RequestSpec(
        RequestId("plain"), tuple(prompt), ((),), sampling, eos, model_config().max_model_len
    )


@dataclass
class Plain:
    """What the plain loop gives."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish: Finish | None


def plain(model: LlamaModel, spec: RequestSpec, branch: int = 0) -> Plain:
    """The plain loop; knows no stop strings."""
    sampling, ids = spec.sampling, list(spec.prompt_token_ids)
    paged = PagedSequences(model, BLOCK_SIZE, seed=1)
    (logits,) = paged.step([(0, ids)])
    wanted = sampling.prompt_logprobs
    prompt_logprobs = (
        [] if wanted is None else logprobs_of(logits[:-1], ids[1:], [wanted] * (len(ids) - 1))
    )
    result = Plain([], [], prompt_logprobs, None)
    while result.finish is None:
        index = len(result.tokens)
        row = SamplingRow(sampling, branch, index, ids, spec.eos_token_ids)
        (token,) = sample(logits[-1:], [row])
        if sampling.logprobs is not None:
            result.logprobs += logprobs_of(logits[-1:], [token], [sampling.logprobs])
        result.tokens.append(token)
        ids.append(token)
        result.finish = finish_after(spec, index, token)
        if result.finish is None:
            (logits,) = paged.step([(0, [token])])
    return result


def close(a: list[TokenLogprobs], b: list[TokenLogprobs]) -> bool:
    """Equal up to the rounding of another batch shape."""
    return len(a) == len(b) and all(
        x.token_id == y.token_id
        and x.top_ids == y.top_ids
        and x.logprob == pytest.approx(y.logprob, abs=1e-4)
        and x.top_logprobs == pytest.approx(y.top_logprobs, abs=1e-4)
        for x, y in zip(a, b, strict=True)
    )


# name: sampling parameters beside BASE; tokens are placed by the test where they matter
PARAMETERS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": tuple(range(0, 250, 2))},
    "temperature": {"temperature": 1.3, "seed": 11},
    "top_k": {"temperature": 1.0, "top_k": 7, "seed": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.7, "seed": 2},
    "min_p": {"temperature": 1.0, "min_p": 0.1, "seed": 3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": (TokenBias(9, 4.0), TokenBias(200, -4.0))},
    "bad_words": {"bad_words": (*((i,) for i in range(0, 250, 5)), (12, 13))},
    "seed": {"temperature": 0.9, "seed": 2**64 - 1},
    "stop": {"stop": ("e", "aa")},
    "include_stop_str_in_output": {"stop": ("e",), "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": tuple(range(0, 250, 9))},
    "ignore_eos": {"ignore_eos": False},
    "skip_special_tokens": {"skip_special_tokens": False},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3},
}
TOGETHER: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 6,
    "seed": 4,
    "prompt_logprobs": 1,
}


# no token hangs on these alone: tests/golden/test_beams.py serves searches on all arrangements
SEARCH = {"num_beams", "length_penalty", "early_stopping"}


def test_every_sampling_parameter_is_here() -> None:
    assert set(PARAMETERS) | SEARCH == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("name", [*PARAMETERS, "all together"])
def test_tokens_are_those_of_the_plain_loop(
    arrangement: Arrangement, model: LlamaModel, name: str
) -> None:
    sampling = replace(BASE, **PARAMETERS.get(name, TOGETHER))
    eos = tuple(range(1, 250, 12))
    specs = [request_of(length, sampling, eos) for length in LENGTHS]
    served = arrangement.serve(*specs)
    for spec, listener in zip(specs, served, strict=True):
        wanted = plain(model, spec)
        finish = listener.ends[0].finish
        num_tokens = len(listener.tokens)
        if finish.reason is FinishReason.STOP and isinstance(finish.stop_reason, str):
            assert finish.stop_reason in sampling.stop
        else:
            assert finish == wanted.finish
            assert num_tokens == len(wanted.tokens)
        assert listener.tokens == wanted.tokens[:num_tokens]
        assert close(listener.logprobs, wanted.logprobs[:num_tokens])
        assert close(listener.prompt_logprobs, wanted.prompt_logprobs)


def test_the_parameters_change_the_tokens(model: LlamaModel) -> None:
    """Else the test above would show nothing."""
    eos = tuple(range(1, 250, 12))
    base = [plain(model, request_of(length, BASE, eos)).tokens for length in LENGTHS]
    silent = {"stop", "include_stop_str_in_output", "skip_special_tokens"}  # text only
    silent |= {"logprobs", "prompt_logprobs"}
    for name, changes in PARAMETERS.items():
        sampling = replace(BASE, **changes)
        changed = [plain(model, request_of(length, sampling, eos)).tokens for length in LENGTHS]
        assert (changed != base) == (name not in silent), name


@pytest.mark.parametrize("decode_blocks", [96, 22], ids=["room", "preempting"])
def test_each_of_four_branches_is_the_plain_loop_of_its_number(
    arrangement: Arrangement, model: LlamaModel, decode_blocks: int
) -> None:
    sampling = replace(BASE, temperature=0.9, top_k=50, seed=6, presence_penalty=0.3)
    eos = tuple(range(1, 250, 40))
    specs = [
        replace(
            request_of(length, replace(sampling, ignore_eos=False), eos),
            request_id=RequestId(f"four {length} {decode_blocks}"),
            suffixes=((),) * 4,
            branches=(0, 1, 2, 3),
        )
        for length in LENGTHS
    ]
    cluster = arrangement.cluster
    held = cluster.named("").worker.engine.pool.allocate(96 - decode_blocks)
    listeners = [cluster.submit(spec) for spec in specs]
    cluster.audit_every_step = False  # the blocks taken away belong to nobody
    cluster.run_until_ended()
    cluster.named("").worker.engine.pool.release(held)
    cluster.audit_every_step = True
    preempted = cluster.named("").worker.engine.scheduler.num_preemptions
    assert (preempted > 0) == (decode_blocks == 22)
    for spec, listener in zip(specs, listeners, strict=True):
        for branch in spec.branches:
            wanted = plain(model, spec, branch)
            assert listener.branches[branch] == wanted.tokens, (spec.request_id, branch)
        assert len({tuple(tokens) for tokens in listener.branches.values()}) == 4


# --- the first tokens -----------------------------------------------------------------------------

FIRST = 21  # the prompt's length: two blocks and a part, one chunk


@pytest.fixture(scope="module")
def greedy(model: LlamaModel) -> list[int]:
    """Tokens 1, 2, 3, … of the prompt, when nothing stops them."""
    tokens = plain(model, request_of(FIRST, BASE)).tokens
    assert len(set(tokens[:4])) == 4
    return tokens


def served_once(arrangement: Arrangement, eos: tuple[int, ...] = (), **changes: Any) -> Any:
    """The listener of one request, which has ended."""
    sampling = replace(BASE, **{"ignore_eos": False, **changes})
    return arrangement.serve(request_of(FIRST, sampling, eos))[0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_end_of_sequence_as_one_of_the_first_tokens(
    arrangement: Arrangement, greedy: list[int], place: int
) -> None:
    listener = served_once(arrangement, eos=(greedy[place],))
    assert listener.tokens == greedy[: place + 1]
    assert listener.ends[0].finish == Finish(FinishReason.STOP)
    assert len(listener.logprobs) == place + 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stop_id_as_one_of_the_first_tokens(
    arrangement: Arrangement, greedy: list[int], place: int
) -> None:
    listener = served_once(arrangement, stop_token_ids=(greedy[place],))
    assert listener.tokens == greedy[: place + 1]
    assert listener.ends[0].finish == Finish(FinishReason.STOP, greedy[place])


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_of_one_and_two(
    arrangement: Arrangement, greedy: list[int], max_tokens: int
) -> None:
    listener = served_once(arrangement, max_tokens=max_tokens)
    assert listener.tokens == greedy[:max_tokens]
    assert listener.ends[0].finish == Finish(FinishReason.LENGTH)
    assert [entry.token_id for entry in listener.logprobs] == greedy[:max_tokens]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 2), (0, 2)])
def test_a_stop_string_inside_tokens_one_and_two(
    arrangement: Arrangement, tokenizer: Tokenizer, begin: int, end: int, include: bool
) -> None:
    """Wherever it begins and ends in the text of the two."""
    text = "ab"
    ids = [tokenizer.encode(character)[0] for character in text]
    bias = tuple(TokenBias(index, 100.0 if place else 60.0) for place, index in enumerate(ids))
    # "b" first by its bias; then a penalty turns it to "a", whose text follows it
    listener = served_once(
        arrangement,
        logit_bias=bias,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        bad_words=((ids[1], ids[1]),),
        stop=("ba"[begin:end],),
        include_stop_str_in_output=include,
    )
    stop = "ba"[begin:end]
    assert listener.tokens == [ids[1], ids[0]][:end]
    assert listener.ends[0].finish == Finish(FinishReason.STOP, stop)
    assert listener.text == "ba"[: end if include else begin]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 5])
def test_min_tokens_hold_over_the_hand_off(
    arrangement: Arrangement, model: LlamaModel, greedy: list[int], min_tokens: int
) -> None:
    eos = tuple(greedy[:4])
    spec = request_of(FIRST, replace(BASE, ignore_eos=False, min_tokens=min_tokens), eos)
    (listener,) = arrangement.serve(spec)
    wanted = plain(model, spec)
    assert listener.tokens == wanted.tokens
    assert not set(listener.tokens[:min_tokens]) & set(eos)
    assert listener.ends[0].finish == wanted.finish


def test_logprobs_of_token_one_come_once_and_are_the_model_s_own(
    arrangement: Arrangement, model: LlamaModel, greedy: list[int]
) -> None:
    """Whatever is done to the logits before sampling."""
    bias = (TokenBias(7, 100.0),)
    listener = served_once(arrangement, logit_bias=bias, max_tokens=3)
    first = listener.logprobs[0]
    assert listener.tokens[0] == first.token_id == 7
    assert first.top_ids[0] == greedy[0], "the likeliest is the model's, not the biased one"
    assert first.logprob < first.top_logprobs[0] < 0
    assert len(listener.logprobs) == 3


@pytest.mark.parametrize("word", [0, 1])
def test_a_bad_word_is_known_across_prompt_and_hand_off(
    arrangement: Arrangement, model: LlamaModel, greedy: list[int], word: int
) -> None:
    """Prompt's last token and token 1; token 1 and token 2."""
    prompt = request_of(FIRST, BASE).prompt_token_ids
    words = ((prompt[-1], greedy[0]), (greedy[0], greedy[1]))
    spec = request_of(FIRST, replace(BASE, bad_words=(words[word],)))
    (listener,) = arrangement.serve(spec)
    assert listener.tokens == plain(model, spec).tokens
    assert listener.tokens[:word] == greedy[:word]
    assert listener.tokens[word] != greedy[word]


@pytest.mark.parametrize("after", [0, 1])
def test_a_request_that_forbids_every_token_is_its_own_fault(
    arrangement: Arrangement, model: LlamaModel, greedy: list[int], after: int
) -> None:
    """With token 1 or with token 2, and its neighbour goes on."""
    every = range(model.config.vocab_size)
    words = tuple((greedy[0], i) if after else (i,) for i in every)
    spec = request_of(FIRST, replace(BASE, bad_words=words))
    guilty, innocent = arrangement.serve(spec, request_of(FIRST, BASE))
    assert innocent.tokens == greedy
    assert guilty.tokens == greedy[:after]
    error = guilty.ends[0].error
    assert isinstance(error, InvalidRequest) and "bad_words" in str(error)


# --- a new attempt --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_delivered", [0, 1, 5])
def test_tokens_and_logprobs_go_on_exactly_in_a_new_attempt(
    model: LlamaModel, tokenizer: Tokenizer, role: str, num_delivered: int
) -> None:
    """Delivered tokens stay output for penalties, limits and indexes."""
    cluster = RealCluster(model=model, block_size=BLOCK_SIZE, num_prefill=2, num_decode=2)
    cluster.run(1.5)
    sampling = replace(BASE, **TOGETHER)
    spec = request_of(40, sampling, tuple(range(1, 250, 12)))
    listener = Arrangement(cluster, tokenizer).submit(spec)
    assert cluster.run(60, lambda: len(listener.tokens) >= num_delivered or bool(listener.ends))
    assert cluster.router is not None
    (request,) = cluster.router.requests.values()
    cluster.run(5, lambda: request.prefill_ref is not None and request.decode_ref is not None)
    ref = request.prefill_ref if role == "prefill" else request.decode_ref
    victim = next(sim for sim in cluster.workers if sim.ref == ref)
    cluster.kill(victim)
    cluster.run_until_ended()
    wanted = plain(model, spec)
    assert listener.tokens == wanted.tokens
    assert close(listener.logprobs, wanted.logprobs)
    assert close(listener.prompt_logprobs, wanted.prompt_logprobs)
    assert listener.ends[0].finish == wanted.finish
    if role == "decode":
        assert request.num_attempts == 2
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()
