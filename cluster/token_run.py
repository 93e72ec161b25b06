"""Output tokens on their way from the router to a front door's session.

Pure data; both sides know it, and nothing else of each other's insides.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.batch import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive output tokens of one branch.

    Attributes:
        first_index: output position of the first.
        token_ids: the tokens.
        logprobs: one per token, or none at all.
        prompt_logprobs: of the prompt's tokens but the first; only where ``first_index`` is 0.
        branch: whose tokens they are.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    branch: int = 0

    def from_index(self, index: int) -> TokenRun:
        """Without the tokens before output position ``index``, which is not before the first."""
        known = index - self.first_index
        if not known:
            return self
        return TokenRun(index, self.token_ids[known:], self.logprobs[known:], branch=self.branch)

    def first(self, count: int) -> TokenRun:
        """The first ``count`` tokens."""
        return TokenRun(
            self.first_index,
            self.token_ids[:count],
            self.logprobs[:count],
            self.prompt_logprobs,
            self.branch,
        )

    def then(self, other: TokenRun) -> TokenRun:
        """This and what follows it, as one."""
        return TokenRun(
            self.first_index,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            self.prompt_logprobs,
            self.branch,
        )
