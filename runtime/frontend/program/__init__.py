r"""Programs: Python functions that mix text, generation, choices and forks over one growing path of tokens.

::

    @program
    def capital(s, country):
        s += f"Q: What is the capital of {country}?\nA:"
        s.gen("city", max_tokens=8, stop="\n", temperature=0)

    runs = capital.map(engine, ["France", "Italy"])   # or run, arun, stream
    print(runs[0]["city"], runs[0].usage)

`program` makes a `Program`; its function works on a `State` (`state.py` has every operation), `Fork` holds a state's children, and
a `Run` is what is left at the end: captures, the exact text, usage, and a trace.
"""

from phloem.runtime.frontend.program.fork import Fork
from phloem.runtime.frontend.program.job import Run
from phloem.runtime.frontend.program.program import Program, program
from phloem.runtime.frontend.program.scope import Piece
from phloem.runtime.frontend.program.state import Mark, Selection, State, Turn
from phloem.runtime.frontend.program.trace import Step, Trace

__all__ = [
    "Fork",
    "Mark",
    "Piece",
    "Program",
    "Run",
    "Selection",
    "State",
    "Step",
    "Trace",
    "Turn",
    "program",
]
