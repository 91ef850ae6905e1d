"""The padding rule, stated once (docs/layouts.md, "Padding").

Page 0, slot 0 and request row 0 are reserved.  A padded row has prefix 1 and extend = the step's
stride; its page-table entries are 0; it reads the reserved page, writes the reserved slot, commits
nothing, and its output is dropped.  No backend states anything of its own about padding.
"""

PAD_PAGE = 0
PAD_SLOT = 0
PAD_ROW = 0
PAD_PREFIX_LEN = 1
