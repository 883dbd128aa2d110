"""``deepspeed.git_version_info``."""

from onecopy.deepspeed.version import git_branch, git_hash, version

__all__ = ["git_branch", "git_hash", "version"]
