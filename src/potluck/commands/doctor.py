"""`potluck doctor`."""

from dataclasses import dataclass


@dataclass
class Doctor:
    """Say what this machine brings, and what is wrong, with the fix."""

    def __call__(self) -> int:
        from potluck.doctor import examine

        return examine()
