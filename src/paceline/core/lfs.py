"""Files that Git LFS left a note in place of."""

from pathlib import Path

LFS_POINTER = "a Git LFS pointer: the repository was cloned without its large files"
LFS_REMEDY = "run git lfs pull there, or name the hub id"
_LFS = b"version https://git-lfs"


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS left a note in place of the file's content; not where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False
