"""The fault soak: one trainer, twelve replicas, a real S3 server, and somebody who breaks things.

    make soak                        ten minutes
    make soak MINUTES=30 SEED=7      longer, with other faults

    conductor.py    starts everything, lets the adversary loose, stops it, waits until all agree
    adversary.py    which fault comes when, by a seed
    proxy.py        all traffic goes through it: cut, stalled or slowed for each client
    nginx.py        a real nginx before the server, with --proxy nginx; certificate.py: its certificates
    damage.py       bits flipped, objects truncated and lost, and put right again
    disk.py         a small file system for the server, so that it can be full
    nursery.py      forks the processes below, which are killed with SIGKILL
    trainer.py      publishes, and keeps a log of its own of what it had
    replica.py      follows, and notes every state it serves
    ledger.py       logs that survive SIGKILL, and hashes
    record.py       what was asked for and what happened
    judge.py        compares the logs and the weights: wrong states, lost versions, leftovers, figures

What counts as right is decided without deltawire: the trainer hashes its weights before it hands them over, replicas
hash theirs after every sync, and the judge compares hashes.
"""
