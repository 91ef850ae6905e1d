"""The flags of `paceline check`, with their help.  No torch."""

from paceline.core.flag import Flag

SUMMARY = "Prove attention backends, cell by cell, against an independent float64 oracle."
EPILOG = """\
A cell is method/backend/mode/runner/variant, for example
dense/triton/target_verify/cuda_graph/topk4.  Examples:

  paceline check                                     the quick matrix of this machine
  paceline check --full --json check.json --html check.html
  paceline check --backend triton --backend fa4      these backends
  paceline check --backend my_package.mod:MyBackend  a backend of your own
  paceline check --filter "verify and not triton"    words: part of the cell, or a glob of all of it
  paceline check --filter "dense/*/decode/* and (page1 or page64)"
  paceline check --full --against old.json           is every bit as it was before a change?

Exit code: 0 when no cell fails, 1 when one does, differs or takes too long, 2 for flags that cannot
work."""


FLAGS = (
    Flag(
        name="device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="Where; auto takes a GPU when there is one.",
    ),
    Flag(
        name="backend",
        metavar="NAME",
        is_repeated=True,
        help="A backend's name, two joined by + (prefill, then decode), cascade(NAME), or "
        "package.module:Class. "
        "May be repeated; without it all that the device can have.",
    ),
    Flag(name="method", metavar="NAME", is_repeated=True, help="dense or swa.  May be repeated."),
    Flag(
        name="mode",
        metavar="NAME",
        is_repeated=True,
        help="A forward mode, such as decode or target_verify.  May be repeated.",
    ),
    Flag(name="filter", metavar="EXPR", help="Cells whose name fits; see below."),
    Flag(name="cells", metavar="FILE", help="Cells by their names, one a line, quick or not."),
    Flag(name="quick", kind=bool, help="The small suite (the default)."),
    Flag(name="full", kind=bool, help="Every case: long contexts, all layouts, dims, dtypes."),
    Flag(name="json", metavar="FILE", help="Write every cell as JSON."),
    Flag(
        name="against",
        metavar="FILE",
        help="An earlier --json of this machine: fail where answers or written KV (the digest of a "
        "cell) differ by a bit.",
    ),
    Flag(name="html", metavar="FILE", help="Write one page for people."),
    Flag(
        name="workers",
        kind=int,
        metavar="N",
        help="Processes that run cells.  [default: the cores; on a GPU half of them, at most 6]",
    ),
)
