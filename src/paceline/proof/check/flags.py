"""The flags of `paceline check`, with their help.  No torch."""

from paceline.core.options.spec import Flag

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
    Flag(
        name="state_backend",
        metavar="NAME",
        is_repeated=True,
        help="A backend of layers that keep states, by name or package.module:Class, for the cells "
        "of its kind.  May be repeated; attention cells then need --backend.",
    ),
    Flag(
        name="method",
        metavar="NAME",
        is_repeated=True,
        help="dense, swa, chunk, mla, cross or embed, or a kind of layers that keep states, such "
        "as sum.  May be repeated.",
    ),
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
