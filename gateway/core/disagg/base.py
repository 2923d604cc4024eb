"""What every connector has: the words of disaggregation, and the interface that the legs are sent by.

A *connector* says how KV cache gets from a prefill engine (P) to a decode engine (D): who is asked first, with which body
and which fields, what P's answer must carry, and how what P holds is freed when nobody comes for it. It is pure: it is handed
the request as facts (`Asked`), the two engines and fresh random bits (`Pair`), and returns requests (`Leg`) to be sent.

    order          what the gateway does
    SERIAL         prefill() to P; take() its answer; decode() with that hand-off to D; relay D
    CONCURRENT     prefill() to P and decode() to D at once; relay D; take() P's answer, for what has failed
    DECODE_FIRST   decode() to D; D posts to the gateway's callback; prefill() with what it posted; relay D
    PROBE          probe() to D; where sign() of its first event is MISSED: prefill() to P, then decode() to D; else relay it
    SIDECAR        decode() to D alone: the sidecar before D does the rest

Before all of them the legs of encode(), where there are any (EPD), each of which must be answered with 200.
What all connectors agree on: one attempt has one id and never becomes another attempt; bodies are the client's octets but
for the members that are owned; what a client sends of a connector's own members never passes.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from gateway.core.dialects import Reading
from gateway.core.disagg import encoding, logprobs
from gateway.core.disagg.answer import fault, fault_of, read_whole
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.body import NULL, Body, as_json
from gateway.core.disagg.shape import Shape, shaped
from gateway.core.disagg.signs import Sign, sign
from gateway.core.inspection import NOT_JSON
from gateway.errors import Refusal

# Header fields that tell engines and sidecars where KV is: never a client's to send, on no leg (pd.md 2.8).
OWNED_FIELDS: Final = frozenset(
    b"x-prefiller-host-port x-encoder-hosts-ports x-data-parallel-host-port x-data-parallel-rank x-kv-target "
    b"x-kv-cache-source-host-port x-llm-d-prefiller-host-port x-llm-d-encoder-hosts-ports "
    b"x-llm-d-kv-cache-source-host-port".split()
)
RANK: Final = b"X-Data-Parallel-Rank"


class Order(enum.Enum):
    SERIAL = "serial"
    CONCURRENT = "concurrent"
    DECODE_FIRST = "decode_first"
    PROBE = "probe"
    SIDECAR = "sidecar"

    @property
    def hands_over(self) -> bool:
        """Whether P's answer says where its KV is, so that D is asked after it."""
        return self in (Order.SERIAL, Order.PROBE)


class Release(enum.StrEnum):
    """When KV that P holds and that no D will fetch is freed by a release leg (pd.md 6.4)."""

    ALWAYS = "always"
    PRESSURE = "pressure"  # where P has little room for more, or does not say
    REJECT = "reject"  # D is sent what it must refuse, and tells P to let go: nothing is transferred, nothing computed
    NEVER = "never"  # the lease runs out by itself


class Bypass(enum.StrEnum):
    """Why a request is served by D alone, in the client's own octets. That is a choice, no fallback: it is counted apart."""

    PATH = "path"  # generates nothing, or its answers carry no hand-off
    ONE_TOKEN = "one_token"  # D would compute but the token that P has computed already
    SHORT = "short"  # below disaggregation.min_prompt_tokens
    PROMPTS = "prompts"  # several prompts: the connector can hand over one
    TOOL_CHOICE = "tool_choice"  # one token is no tool call: P would answer with an error
    BEAM_SEARCH = "beam_search"  # many engine requests, one hand-off
    STATEFUL = "stateful"  # it goes on from an answer that one engine keeps, or that is to be fetched later


class Engine(NamedTuple):
    """What a connector must know of a backend. All but the first three are the operator's settings, or learnt."""

    name: str
    host: str  # as engines reach it: a name or an address, IPv6 without brackets
    port: int  # of its HTTP server
    kv_host: str | None = None  # where its connector listens, if that is another address
    kv_port: int | None = None  # of the connector: NIXL's side channel, P2P NCCL's ZMQ port, the offloading connector's
    bootstrap_port: int | None = 8998  # Mooncake's and SGLang's bootstrap server; None: sent as null
    handshake_port: int | None = None  # MoRIIO
    notify_port: int | None = None  # MoRIIO
    dp_size: int = 1
    tp_size: int = 1
    engine_ids: Mapping[int, str] = {}  # by DP rank, as learnt (`Connector.learn`)

    @property
    def kv_name(self) -> str:
        return self.kv_host or self.host

    @property
    def kv_address(self) -> str:
        """host:port of the connector, IPv6 in brackets. Raises LookupError where no port is known."""
        if self.kv_port is None:
            raise LookupError(f"backend {self.name}: kv_port is not set")
        return f"{bracketed(self.kv_name)}:{self.kv_port}"


class Pair(NamedTuple):
    """One attempt: two engines, and the random bits that are its own. A second attempt is another Pair."""

    attempt: str  # 32 hexadecimal digits: the id of both legs
    prefill: Engine
    decode: Engine
    room: int = 0  # 63 random bits; batches take as many rooms from here on
    rank: int = 0  # DP rank that both engines are to use, where the connector asks for one; below dp_size of both
    callback: str = ""  # URL at which D reaches this gateway (DECODE_FIRST)
    encoders: tuple[Engine, ...] = ()
    conversation: str = ""  # key of the conversation (nixl_bidirectional), "" for none
    now: float = 0.0  # when the attempt begins, on the caller's clock (nixl_bidirectional)
    capped: bool = False  # P stages nothing where its token ends the answer, as it has shown: none may (`HandoffMissing.early`)


class Leg(NamedTuple):
    """A request to one engine: POST, JSON. `request_id` replaces the client's X-Request-Id, `fields` are set, not added."""

    path: bytes
    body: bytes
    request_id: bytes
    fields: tuple[tuple[bytes, bytes], ...] = ()


class Handoff(NamedTuple):
    """What P's answer brought."""

    params: bytes = b""  # kv_transfer_params for D as JSON, octet for octet P's own; b"": nothing is carried
    cached_tokens: int | None = None  # of P's usage: the truth about the prefix cache (D counts what was transferred)
    prompt_logprobs: bytes = b""  # as JSON, where P was asked for them


class HandoffMissing(Refusal):
    """P answered with 200 and without what D needs. Its text says what is missing. Another P may be tried once. `early`: the
    first token ended the answer, and the engine may be one that stages nothing then: the same P may be asked `Pair.capped`.
    `holds`: P keeps KV nevertheless, which nobody can fetch. `error`: what it answered, where it is an error."""

    def __init__(self, message: str, *, early: bool = False, holds: bool = False, error: bytes = b""):
        super().__init__("pd_handoff_missing", message)
        self.early, self.holds, self.error = early, holds, error


class TransferFailed(Refusal):
    """KV did not get from P to D."""

    def __init__(self, message: str):
        super().__init__("pd_transfer_failed", message)


class Rules(NamedTuple):
    """The operator's choices for a pool, as far as bodies are concerned."""

    min_prompt_tokens: int = 0  # shorter prompts are served by D alone
    prompt_logprobs: str = "reject"  # or merge: P computes them, and `merged` puts them into D's whole answer
    tool_choice: str = "bypass"  # a required tool: bypass; auto (P is told auto: the template must not depend on it); pass
    list_prompts: str = "bypass"  # or reject
    messages: bool = True  # the engines' /v1/messages takes kv_transfer_params and answers with them (vLLM 0.32 does)
    remote_host: bool = False  # replace remote_host in P's answer by the host that the gateway reaches P at
    cache_threshold: float = 0.8  # shared_storage: part of the prompt that D must have to go ahead alone


GENERATING: Final = frozenset(
    (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/inference/v1/generate")
)


class Connector(abc.ABC):
    """The interface. An instance is stateless but for nixl_bidirectional's store, and serves one pool."""

    name: ClassVar[str]
    order: ClassVar[Order]
    hold: ClassVar[float]  # seconds that P keeps KV for a D that does not come, by the engine's own default; 0: it does not
    waits: ClassVar[bool] = False  # P answers once D has fetched: whoever has its answer knows that it holds nothing any more
    defers: ClassVar[float] = 0.0  # seconds that D's output, once begun, waits for P's outcome; 0: it proves the transfer
    release_policy: ClassVar[Release] = Release.ALWAYS
    abort_in_transfer_unsafe: ClassVar[bool] = False  # D must not be aborted between its dispatch and its first byte
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # role -> fields of Engine that the operator must set
    learns: ClassVar[bool] = False  # Engine.engine_ids must be learnt of P before it can be used (`ask`, `learn`)
    ranked: ClassVar[bool] = False  # Pair.rank is pinned
    serves_alone: ClassVar[bool] = True  # D can serve a request without a hand-off (`alone`)
    shapes: ClassVar[bool] = True  # P is asked for one token; where not, both get the client's own body
    paths: ClassVar[frozenset[bytes]] = GENERATING
    lists: ClassVar[bool] = False  # several prompts in one request can be handed over
    several: ClassVar[bool] = True  # n > 1 works
    asks_again: ClassVar[bool] = True  # a D that has had the request may be asked to free KV: what is gone already it says
    tells: ClassVar[bool] = False  # a D that refuses what was to fetch KV tells P to let go of it (`reject`)
    reusable: ClassVar[bool] = True  # params may go to another D if the first one provably got no octet of the request
    shape: ClassVar[Shape] = Shape()

    def __init__(self, rules: Rules = Rules()):
        self.rules = rules

    # whether ----------------------------------------------------------------------------------------------------------

    def judge(self, asked: Asked) -> Bypass | None:
        """None: disaggregate. Else D alone is to serve it, with `alone`. Raises Refusal where it can be served in no way."""
        if asked.path not in GENERATING | self.paths:
            return Bypass.PATH
        rules, impossible = self.rules, self._impossible(asked)
        if impossible is not None:
            why, param, message = impossible
            if not self.serves_alone or (why is Bypass.PROMPTS and rules.list_prompts == "reject"):
                raise Refusal("bad_request", f"{message} (disaggregation.connector: {self.name})", param=param)
            return why
        if self.serves_alone:
            if asked.max_tokens is not None and asked.max_tokens <= 1:  # less than one is the engine's to refuse
                return Bypass.ONE_TOKEN
            if asked.tokens < rules.min_prompt_tokens:
                return Bypass.SHORT
        wanted, merges = asked.prompt_logprobs, rules.prompt_logprobs == "merge" and self.order is Order.SERIAL
        if wanted is not None and self.shapes and (asked.stream or wanted == "echo" or not merges):
            raise Refusal(
                "bad_request",
                f"{wanted}: the engine that decodes has not seen the prompt, so that it cannot compute this"
                + " (disaggregation.prompt_logprobs)",
                param=wanted,
            )
        if asked.tool_forced and rules.tool_choice == "bypass" and self.shapes and self.serves_alone:
            return Bypass.TOOL_CHOICE
        return None

    def _impossible(self, asked: Asked) -> tuple[Bypass, str | None, str] | None:
        """What keeps the connector from handing this request over: the reason, the member, and the words for a refusal."""
        path = asked.path
        if path not in self.paths or (path == b"/v1/messages" and not self.rules.messages):
            return Bypass.PATH, None, f"{path.decode()} cannot be disaggregated"
        if not self.shapes:
            return None
        if asked.stateful:
            return Bypass.STATEFUL, None, "an answer that an engine keeps cannot be gone on from on other engines"
        if asked.beam_search:
            return Bypass.BEAM_SEARCH, "use_beam_search", "beam search is many requests with one hand-off"
        if asked.prompts > 1 and not self.lists:
            message = (
                f"prompt: found {asked.prompts} prompts; the KV cache of one only can be handed over: send them one by one"
            )
            return Bypass.PROMPTS, "prompt", message
        if asked.n > 1 and not self.several:
            return Bypass.PROMPTS, "n", f"n: found {asked.n}; one answer only can be decoded: send the request {asked.n} times"
        return None

    # the legs ---------------------------------------------------------------------------------------------------------

    def encode(self, asked: Asked, pair: Pair) -> Sequence[Leg]:
        """Requests to `pair.encoders`, one after the other in turn, before all else. Raises Refusal."""
        if not pair.encoders:
            return ()
        bodies = encoding.bodies(asked)
        return [Leg(encoding.PATH, body, f"{pair.attempt}:{i}:{pair.attempt[:6]}".encode()) for i, body in enumerate(bodies)]

    def encoded(self, name: str, answer: bytes) -> None:
        """The answer of the encoder of this name, whose status was 200. Raises HandoffMissing: it is an error, or none."""
        found = fault_of(read_whole(encoding.PATH, answer), answer)
        if found is not None:
            raise HandoffMissing(f"the encoder {name} answered with 200, but its answer {found.words}", error=found.error)
        try:
            encoding.merged((answer,))
        except Refusal as refusal:
            raise HandoffMissing(f"the encoder {name} answered with no JSON object: {why_not(refusal)}") from None

    def gathered(self, asked: Asked, answers: Sequence[bytes]) -> Asked:
        """What is asked of P and D, now that the encoders have answered, each so that it could be read (`encoded`)."""
        asked.ec = encoding.merged(answers)
        return asked

    def probe(self, asked: Asked, pair: Pair) -> Leg:
        """PROBE: what D is asked first."""
        raise NotImplementedError

    @abc.abstractmethod
    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        """The request to P. `posted` (DECODE_FIRST): kv_transfer_params as the callbacks brought them."""

    def take(self, asked: Asked, pair: Pair, answer: bytes) -> Handoff:
        """P's answer, whose status was 200. Raises HandoffMissing: it is an error, or none that D can be asked with."""
        reading = read_whole(asked.path, answer) if self.shapes else None
        found = fault(asked.path, answer) if reading is None else fault_of(reading, answer)
        if found is not None:
            message = f"the prefill engine {pair.prefill.name} answered with 200, but its answer {found.words}"
            raise HandoffMissing(message, holds=self._holds(answer), error=found.error)
        if reading is None:
            return Handoff()
        try:
            return self.accept(pair, _answer(answer, pair), reading)
        except HandoffMissing as missing:
            missing.holds = self._holds(answer)
            raise
        except Refusal as refusal:
            message = f"the prefill engine {pair.prefill.name} answered with kv_transfer_params that cannot be read"
            raise HandoffMissing(f"{message}: {why_not(refusal)}", holds=self._holds(answer)) from None

    def accept(self, pair: Pair, said: Body, reading: Reading) -> Handoff:
        """P's answer to a request that was `shaped`, in which nothing has failed. Raises Refusal, mostly HandoffMissing, naming
        what is missing."""
        return Handoff(b"", reading.cached_tokens, logprobs.found(said))

    def _holds(self, answer: bytes) -> bool:
        """Whether P, whose answer is of no use, keeps KV by it: it says where."""
        if not self.hold or not self.order.hands_over:
            return False
        try:
            given = Body(answer).raw("kv_transfer_params") or b""
        except Refusal:
            return False
        return given.startswith(b"{") and given[1:].lstrip() != b"}"

    @abc.abstractmethod
    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        """The request to D. Raises LookupError where the engines' data is not known (yet)."""

    def release(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        """The request to the same D that makes P free what it holds: one token, thrown away. None: there is no such thing."""
        return None

    def reject(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        """As `release`, but to be refused, where D tells P of that (`tells`). vLLM does so for whatever its serving layer turns
        down (`_with_kv_transfer_rejection_cleanup`, vllm/entrypoints/generate/base/serving.py of 0.32): here a beam search
        that is to be streamed, and a model that is not there; either alone will do, whatever an operator's flags let pass."""
        leg = self.release(asked, pair, handoff) if self.tells else None
        if leg is None:
            return None
        given = Body(leg.body).raw("kv_transfer_params") or NULL
        body = params(model=f"release-{pair.attempt}", prompt=".", max_tokens=1, stream=True, use_beam_search=True)
        return Leg(b"/v1/completions", Body(body).edited({"kv_transfer_params": given}), leg.request_id, leg.fields)

    def alone(self, asked: Asked, pair: Pair) -> Leg:
        """The client's own body, for a bypass or a fallback: D alone serves it, and nothing is transferred."""
        return Leg(asked.path, asked.edited(asked.encoded), pair.attempt.encode())

    # what comes back --------------------------------------------------------------------------------------------------

    def sign(self, data: bytes, status: int, asked: Asked) -> Sign:
        """Of the first event's data of D's stream, or of D's whole unstreamed answer."""
        return sign(data, status)

    def merged(self, asked: Asked, handoff: Handoff, answer: bytes) -> bytes:
        """D's whole unstreamed answer of status 200, with what P has computed for it: only where `asked.prompt_logprobs`."""
        return logprobs.merged(asked, answer, handoff.prompt_logprobs)

    def conversation(self, asked: Asked) -> str:
        """What `Pair.conversation` is to be, where the request itself names its conversation; "" where it does not."""
        return ""

    def answered(self, pair: Pair, data: bytes, now: float) -> bool:
        """D's whole answer, or its last event, has passed. Returns whether it was of use (nixl_bidirectional keeps it)."""
        return False

    # what must be known beforehand ------------------------------------------------------------------------------------

    def ask(self, engine: Engine) -> str:
        """The URL at which P says its `Engine.engine_ids` (`learns`); asked again when P restarts or a transfer fails."""
        raise NotImplementedError

    def learn(self, answer: bytes) -> Mapping[int, str]:
        """`Engine.engine_ids`, by what that URL answered with 200. Raises ValueError, saying what was found."""
        raise NotImplementedError

    # what it is made of -----------------------------------------------------------------------------------------------

    def shaped(self, asked: Asked, put: Mapping[str, bytes], shape: Shape | None = None) -> bytes:
        """The client's body as one that computes a single token, with the members of `put`."""
        return shaped(
            asked,
            {**asked.encoded, **put},
            shape or self.shape,
            tool_auto=self.rules.tool_choice == "auto" or not self.serves_alone,
            prompt_logprobs=self.rules.prompt_logprobs == "merge",
        )

    def one_token(self, asked: Asked, params: bytes) -> bytes:
        """The body of a release leg: the client's prompt, the params that D gets, and one token that nobody will read."""
        return shaped(asked, {"kv_transfer_params": params}, Shape(), tool_auto=True, prompt_logprobs=False)

    def with_params(self, asked: Asked, params: bytes) -> bytes:
        """The client's body with kv_transfer_params as its one new member, and without whatever P has computed for it."""
        return self.for_decode(asked, {"kv_transfer_params": params})

    def for_decode(self, asked: Asked, put: Mapping[str, bytes] = {}) -> bytes:
        """The client's body with the members of `put`, and without whatever P has computed for it."""
        if asked.prompt_logprobs is None or not self.shapes:
            return asked.edited(put)
        drop, put = frozenset(("prompt_logprobs",)), dict(put)  # Rules.prompt_logprobs
        if asked.sampling is not None:
            sampling = Body(asked.cleaned.get("sampling_params", asked.sampling.octets))
            put["sampling_params"] = sampling.edited(drop=drop)
        return asked.edited(put, drop)


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def missing(engine: Engine, connector: type[Connector], role: str) -> list[str]:
    """Which of the fields that a connector needs of an engine in this role are not set."""
    return [name for name in connector.needs.get(role, ()) if getattr(engine, name) in (None, (), "")]


def params(**values: object) -> bytes:
    return as_json(values)


def _answer(answer: bytes, pair: Pair) -> Body:
    """P's answer, as a JSON object. Raises HandoffMissing."""
    try:
        return Body(answer)
    except Refusal as refusal:
        name = pair.prefill.name
        raise HandoffMissing(f"the prefill engine {name} answered with no JSON object: {why_not(refusal)}") from None


def why_not(refusal: Refusal) -> str:
    """Why something is no JSON object, which is not the client's."""
    return refusal.message.removeprefix(NOT_JSON)
