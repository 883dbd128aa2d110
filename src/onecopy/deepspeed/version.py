"""The version of DeepSpeed whose names and semantics these are, marked as not being it."""

__all__ = ["git_branch", "git_hash", "numbers", "version"]

numbers = (0, 19, 8)
version = f"{'.'.join(map(str, numbers))}+onecopy"
git_hash = "onecopy"
git_branch = "onecopy"
