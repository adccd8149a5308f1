"""Engine script of a conformance scenario.

1. Replies are tokenized at random, also inside words and characters and differently on every call, as a model
   samples and a tokenizer never encodes.
2. A prompt outside the scenario gets a reply, so that the client ends, and is recorded as unexpected, which
   fails the run.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from afield import factory
from afield.conformance.model import CHATML, CONTROL, MARKERS, TemplateFamily
from afield.conformance.scenario import ModelReply, NetworkFault, Scenario, last_marker
from afield.interfaces import GenerateRequest

SLOW_S = 0.05  # delay before each chunk of a reply whose connection is cut
SLOW_WHOLE_S = 6.0  # delay of such a reply without streaming
LONGEST_PIECE = 16
TURN = "<|im_start|>assistant\n"
_SPECIAL = re.compile("|".join(re.escape(text) for text in (*CONTROL, *MARKERS)))


class RandomTokenizer:
    """Tokenizer that splits text at random into tokens of the vocabulary."""

    def __init__(self, vocabulary: Any) -> None:
        spelled = {n: vocabulary.piece(n) for n in range(vocabulary.size)}
        special = {vocabulary.id_of(text): text for text in (*CONTROL, *MARKERS)}
        self._special: dict[str, int] = {text: n for n, text in special.items()}
        self._pieces: dict[bytes, int] = {b: n for n, b in spelled.items() if b and n not in special}

    def sample(self, text: str, chance: random.Random) -> list[int]:
        """Random token ids of a text; control tokens stay whole."""
        ids: list[int] = []
        at = 0
        for match in _SPECIAL.finditer(text):
            ids += self._plain(text[at : match.start()].encode(), chance)
            ids.append(self._special[match[0]])
            at = match.end()
        return ids + self._plain(text[at:].encode(), chance)

    def _plain(self, data: bytes, chance: random.Random) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(at + 1, min(at + LONGEST_PIECE, len(data)) + 1)
            end = chance.choice([end for end in ends if data[at:end] in self._pieces])
            ids.append(self._pieces[data[at:end]])
            at = end
        return ids


class Script:
    """Function from an engine call to a scripted reply.

    `replies` and `places` hold the reply and its marker or phrase, by call id; `asked` counts the calls per
    marker or phrase; `unexpected_prompts` are prompts outside the scenario.
    """

    def __init__(self, scenario: Scenario, vocabulary: Any, family: TemplateFamily = CHATML) -> None:
        self._scenario = scenario
        self._family = family
        self._vocabulary = vocabulary
        self._sampler = RandomTokenizer(vocabulary)
        self._scripted: Callable[..., Any] = factory.scripted_reply()
        self.requests: Counter[str] = Counter()
        self.unexpected_prompts: list[str] = []
        self.replies: dict[str, ModelReply] = {}
        self.places: dict[str, str] = {}

    def __call__(self, call: GenerateRequest) -> Any:
        prompt: str = self._vocabulary.decode(call.prompt_ids)
        where, reply = self._reply(prompt)
        self.requests[where] += 1
        self.replies[call.id], self.places[call.id] = reply, where
        chance = random.Random(f"{where} {self.requests[where]}")
        slow = self._scenario.faults.get(where) is NetworkFault.CUT and self.requests[where] == 1
        return self._scripted(
            token_ids=(*self._sampler.sample(self._family.spell(reply), chance), *call.stop_ids[:1]),
            chunks=tuple(chance.randint(1, 4) for _ in range(12)),
            delay_s=(SLOW_S if call.stream else SLOW_WHOLE_S) if slow else 0.0,
        )

    def _reply(self, prompt: str) -> tuple[str, ModelReply]:
        asides = self._scenario.asides
        new = prompt.removesuffix(TURN + self._family.opening).rpartition(TURN)[2]
        where = next((phrase for phrase in asides if phrase in new), last_marker(prompt))
        answer = asides.get(where or "") or self._scenario.replies.get(where or "")
        if where is None or answer is None:
            self.unexpected_prompts.append(f"nothing to say at {where}; the prompt ends {prompt[-300:]!r}")
            return "unexpected", ModelReply(text="The scenario has no reply for this prompt.")
        return where, answer(prompt) if callable(answer) else answer

    def unused_replies(self) -> list[str]:
        """Markers and phrases that the client never requested."""
        counts: Mapping[str, int] = self.requests
        return [where for where in (*self._scenario.replies, *self._scenario.asides) if not counts[where]]
