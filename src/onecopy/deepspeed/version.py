"""The version of DeepSpeed whose names and semantics these are, marked as not being it."""

__all__ = ["git_branch", "git_hash", "version"]

version = "0.19.8+onecopy"
git_hash = "onecopy"
git_branch = "onecopy"
