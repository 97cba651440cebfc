"""A state's token path: what the program wrote and the model generated, and the branch that holds its KV.

The ids are the truth and the branch follows: appending and cutting change the ids alone, and `settle` brings the branch in
line before something is computed. So text costs no turn of the engine's thread until it is needed::

    ids     [ 0 ............ num_synced ............ len(ids) )
    branch  [ 0 ............ num_synced ............ len(branch) )      equal below num_synced, unrelated above
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import BranchReleased, ProgramError, PromptTooLong
from phloem.runtime.frontend.program.calls import Calls
from phloem.runtime.outputs import Usage

MAX_SEAM = 8
"""Tokens at the end of appended text that may be tokenised anew together with what is generated."""


@dataclass(slots=True, eq=False)
class TokenPath:
    """See the module. Owned by one `State`, which is used by one thread or task at a time."""

    engine: Engine
    namespace: Namespace | None
    ids: array[int]
    text_from: int
    """`ids[text_from:]` is plain text that was appended: nothing generated, nothing of a chat template."""

    branch: Branch | None = None
    num_synced: int = 0
    is_released: bool = False

    @classmethod
    def empty(cls, engine: Engine, namespace: Namespace | None) -> TokenPath:
        """Return a path of no tokens."""
        return cls(engine, namespace, array("i"), 0)

    def append(self, ids: Sequence[int], *, is_text: bool) -> None:
        """Append tokens. O(len(ids)).

        Raises:
            PromptTooLong: The path would leave no room for a token more.
        """
        self.check()
        limit = self.engine.max_model_len
        if len(self.ids) + len(ids) >= limit:
            raise PromptTooLong(
                f"the state would have {len(self.ids) + len(ids)} tokens; the model's context and the KV pool hold {limit}, "
                "and at least one must be left for the answer: shorten the text",
                field="text",
            )
        self.ids.extend(ids)
        if not is_text:
            self.text_from = len(self.ids)

    def append_text(self, text: str) -> None:
        """Append text, tokenised alone; the first text brings the token that the model wants in front of all, if any.

        Raises:
            InvalidRequest: No UTF-8 can hold it.
            PromptTooLong: The path would leave no room for a token more.
        """
        tokenizer = self.engine.tokenizer
        if text:
            self.append(
                tokenizer.encode_continuation(text) if self.ids else tokenizer.encode(text), is_text=True
            )

    def append_scored(self, ids: Sequence[int]) -> None:
        """Append a continuation that the settled branch has just scored, whose KV is in the cache therefore, but for its last token's.

        Raises:
            PromptTooLong: The path would leave no room for a token more.
        """
        self.append(ids, is_text=False)
        if len(ids) > 1:
            # The branch goes on from what it holds itself; one that holds nothing yet takes all that the cache has of its path.
            self._take(self.engine.branch(self.ids, namespace=self.namespace))
            self.num_synced = len(self.ids)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        del self.ids[length:]
        self.num_synced = min(self.num_synced, length)
        self.text_from = min(self.text_from, length)

    def fingerprint(self, length: int) -> int:
        """Return a number that paths with the same first tokens share, in this process. O(length), 4 bytes each."""
        return hash(self.ids[:length].tobytes())

    def seam(self) -> array[int]:
        """Return the end of the appended text that what comes next may change: at most `MAX_SEAM` tokens."""
        return self.ids[max(self.text_from, len(self.ids) - MAX_SEAM) :]

    async def settle(self, calls: Calls) -> Branch:
        """Return the branch, which holds just these ids now.

        Raises:
            ProgramError: There are no tokens yet.
            BranchReleased: The state was released.
        """
        self.check()
        if not self.ids:
            raise ProgramError("the state is empty: append text before something is generated or scored")
        branch = self.branch
        if branch is None or self.num_synced == 0:
            branch, held = self.engine.branch(self.ids, namespace=self.namespace), len(self.ids)
            self._take(branch)
        elif self.num_synced < (held := len(branch)):
            branch, held = await calls.at(branch, self.num_synced), self.num_synced
            self._take(branch)
        if held < len(self.ids):
            await calls.append(branch, self.ids[held:])
        self.num_synced = len(self.ids)
        return branch

    def follow(self, token_ids: Sequence[int], branch: Branch | None = None) -> None:
        """Take over what was generated at the end of the path.

        Args:
            token_ids: What was generated.
            branch: A child that holds it, which takes the branch's place. None: the branch itself holds it.
        """
        if branch is not None:
            self._take(branch)
        self.ids.extend(token_ids)
        self.num_synced = self.text_from = len(self.ids)

    async def compute(self, calls: Calls) -> Usage:
        """Compute the whole path, the last token too, so that forks find all of it; return what that took."""
        branch = await self.settle(calls)
        [score] = await calls.score(branch, [self.ids[-1:]])
        return score.usage

    async def fork(self, calls: Calls, n: int) -> list[TokenPath]:
        """Return n paths of the same tokens, which share what is computed of them."""
        self.check()
        if not self.ids:
            return [TokenPath.empty(self.engine, self.namespace) for _ in range(n)]
        branch = await self.settle(calls)
        branches = await calls.fork(branch, n)
        return [
            TokenPath(self.engine, self.namespace, self.ids[:], self.text_from, each, len(self.ids))
            for each in branches
        ]

    def rest(self) -> None:
        """Let go of the branch. The next `settle` opens another one, which takes what the cache still has."""
        branch, self.branch, self.num_synced = self.branch, None, 0
        if branch is not None:
            branch.release()

    def check(self) -> None:
        """Raise `BranchReleased` when the path was released."""
        if self.is_released:
            raise BranchReleased(
                "this state was released when its fork's `with` block, or its run, ended; use it inside"
            )

    def handed_over(self) -> TokenPath:
        """Return what stays of a path that another state takes over: nothing that could be used."""
        return TokenPath(self.engine, self.namespace, array("i"), 0, is_released=True)

    def release(self) -> None:
        """End the branch, and what runs on it. A second call does nothing."""
        self.is_released = True
        if self.branch is not None:
            self.branch.release()

    def _take(self, branch: Branch) -> None:
        old, self.branch = self.branch, branch
        if old is not None:
            old.release()
        if self.is_released:  # meanwhile, by whoever ended the run
            branch.release()
            self.check()
