"""The package named ``deepspeed`` whose modules are those of ``onecopy.deepspeed``."""

from onecopy.deepspeed.alias import take_over

take_over(__name__)
