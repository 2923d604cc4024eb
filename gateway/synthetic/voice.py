"""A stream's events written from the timer's own call: the usual answer, without a coroutine resumed for each event.

The event that brings a word is rendered once, when the stream begins, and the word put into it.
"""

from __future__ import annotations

from gateway.synthetic.dialect import Dialect
from gateway.synthetic.framing import Frame, frame
from gateway.synthetic.generation import Step
from gateway.synthetic.outlet import Ordinary
from gateway.synthetic.text import json_bytes


class Spoken:
    """`even`: every step is a run of words of one answer. `over`: the last step and all that follows it are out."""

    def __init__(self, outlet: Ordinary, shape: Dialect, framed: Frame, *, even: bool):
        self._outlet, self._shape, self._frame = outlet, shape, framed
        # What may be escaped or numbered is not rendered beforehand.
        word = shape.word() if even and framed is frame else None
        self.plain = word is not None
        self._before, _, self._after = (b"", b"", b"") if word is None else framed(word).partition(b"\0")
        self._fixed = len(self._before) + len(self._after)
        self.over = False

    def text(self, text: str, due: float) -> bool:
        said = json_bytes(text)
        size = self._fixed + len(said)
        return self._outlet.put(b"%x\r\n%b%b%b\r\n" % (size, self._before, said, self._after), due, size)

    def step(self, step: Step) -> bool:
        framed = self._frame
        events = [framed(event) for event in self._shape.step(step)]
        if step.finish is not None:
            events += [framed(event) for event in self._shape.closing()]
            self.over = True
        return self._outlet.put_all(events, step.due, last=self.over)

    async def settled(self) -> None:
        await self._outlet.settled()
