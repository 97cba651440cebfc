"""Tree search over branches: best-of-n, beams, trees of thoughts, Monte Carlo tree search.

A `SearchTree` holds a prompt and what grows from it; the searches are functions over it, with a step (`Sample`, `Propose`)
that says how a node gets children and a value (a function, `ScoreValue`, `VoteValue`) that says what they are worth.
What they have in common, and what a search of your own is written with, is `Growth`. `arun` runs any of them in an event loop.
"""

from phloem.runtime.frontend.search.asynchronous import arun
from phloem.runtime.frontend.search.budget import Budget
from phloem.runtime.frontend.search.depth_first import depth_first
from phloem.runtime.frontend.search.growth import Growth
from phloem.runtime.frontend.search.levels import beam, breadth_first, dvts
from phloem.runtime.frontend.search.mcts import Puct, Rule, Uct, mcts
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.frontend.search.sampling import Consensus, best_of_n, self_consistency
from phloem.runtime.frontend.search.steps import Propose, Sample, Step
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import FunctionValue, ScoreValue, Value, VoteValue

__all__ = [
    "Budget",
    "Consensus",
    "FunctionValue",
    "Growth",
    "Node",
    "Propose",
    "Puct",
    "Rule",
    "Sample",
    "ScoreValue",
    "SearchTree",
    "Step",
    "Uct",
    "Value",
    "VoteValue",
    "arun",
    "beam",
    "best_of_n",
    "breadth_first",
    "depth_first",
    "dvts",
    "mcts",
    "self_consistency",
]
