"""The ``kvplane`` command. Every command is a user of the library, but for ``up``, which starts the two services.

Exit codes, for every command::

    0    done
    1    an error, explained on stderr
    2    wrong usage
    3    the server cannot be reached, or is not ready
    130  interrupted (Ctrl-C)
"""
