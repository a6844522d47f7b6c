"""One model over several processes of one machine, which the manager sees as one executor."""
