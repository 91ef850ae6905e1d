"""A one-line progress display on stderr; silent when nobody is watching."""

import sys
from types import TracebackType


class Progress:
    """Counts bytes towards a total.  `shown` None means: only on a terminal."""

    def __init__(self, label: str, total_bytes: int, *, shown: bool | None = None) -> None:
        self._label = label
        self._total = max(total_bytes, 1)
        self._done = 0
        self._percent = -1
        self._shown = sys.stderr.isatty() if shown is None else shown

    def __enter__(self) -> "Progress":
        self.advance(0)
        return self

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more; rewrites the line once per percent."""
        self._done += num_bytes
        percent = 100 * self._done // self._total
        if not self._shown or percent == self._percent:
            return
        self._percent = percent
        done, total = self._done / 1e9, self._total / 1e9
        sys.stderr.write(f"\r{self._label} {percent:3d}%  {done:.2f} of {total:.2f} GB")
        sys.stderr.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write("\n")
