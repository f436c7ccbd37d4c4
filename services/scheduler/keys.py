"""Every Redis key of Forebay, in one place. The prefix carries the schema's version; Lua gets the same names as its table K.

schema                 string   version of this layout, outside the prefix; a scheduler refuses one it doesn't know
ticket:<request>       hash     a ticket's life: spec, state, order, epoch, lease; expires after its end
fifo:<queue>           zset     request ids of one (model, class, org), by order
queues                 set      names of the fifos that are not empty
waiting                hash     line, one (model, class) -> tickets waiting in it
held                   zset     queued tickets by the time their Place stream was last seen
deadlines              zset     queued tickets by their deadline
turns:<line>           zset     queues of the line that are not empty, by the tokens their org was given there, divided by its weight
spent:<line>           zset     the same of empty queues, as orgs come back; expires when nobody has for an hour
clock:<line>           string   tokens of the queue that was emptied last: what a newcomer to an empty line starts at; expires likewise
recent:<model>         hash     tokens placed of late by class, decaying, and when they were counted
starting, running      zset     leases by the time of placement / of their last listing in a heartbeat
worker:<id>            hash     incarnation, room used by class, blocks held by org, flags
leases:<worker>        set      request ids that this worker has leases of
serving                zset     [model, version] by the last heartbeat of a worker that has it loaded
order                  string   last order number given out
quota:<org>            hash     what an org has taken from its buckets; gone when they are full
live:<org>             set      request ids of an org that are queued or placed
users:<day>            set      orgs that used anything on a day, counted from 1970; expires after 91 days, as does:
usage:<day>:<org>      hash     counter:line -> what the org used
explanation:<request>  string   why an ended request took so long (base64 of a protobuf); expires after an hour
explained              list     [request id, bytes, when] (JSON) of those that are kept, newest first
explained_bytes        string   their bytes
orgs                   hash     org -> what operators have set over the policy file (JSON)
drained                hash     worker or node that an operator has taken out of service -> who did
pins                   hash     [worker, node or '' for all, model] (JSON) that an operator has pinned -> who did
placer                 string   the scheduler that brings models to devices ahead of requests; expires when it doesn't come back
affinity               hash     [model, worker] (JSON) -> whether it is on the device there, and when it was asked for (JSON)
api_keys               hash     SHA-256 of an API key, in hex -> whose it is (JSON)
audit                  list     the latest acts of operators (JSON), newest first
denied                 list     the latest acts that others tried (JSON), newest first
file:<id>              hash     a file: whose, name, purpose, state, bytes, lines, times, and how many open jobs read it
parts:<file>           hash     number -> a part of an uploaded file: whole lines, about 64 KiB
starts:<file>          zset     numbers of the parts by the number of their first line
results:<file>         hash     line -> its result, in a job's output or error file
files:<org>            zset     ids of files by the time they came
stored                 hash     org -> bytes of its files; '' -> of all
expiring               zset     "file:id" and "batch:id" by the time at which they go
batch:<id>             hash     a job: whose, input file, endpoint, state, times, counts, errors
batches:<org>          zset     ids of jobs by the time they came
open:<org>             set      ids of jobs that are not over
ready                  zset     ids of open jobs by the time from which there may be a line to take
todo:<batch>           zset     lines that nobody works on, by the time from which they may be taken
taken:<batch>          zset     lines that are worked on, by the time at which they are lost
tries:<batch>          hash     line -> times that it was taken, which is the epoch of whoever holds it
strikes:<batch>        hash     line -> times that it was lost, or failed on our side
ended:<batch>          list     lines that have a result, in the order in which they came; negative ones (-1 - line) are errors
submitted:<org>:<key>  string   [job, fingerprint] (JSON) of an idempotency key; expires with the files
once:<org>:<hash>      string   the claim of an idempotency key, hashed with its caller; expires a while after the request's deadline
onces:<org>            zset     those hashes by the time of their last try: the oldest are forgotten first
claim:<stem>           hash     what a key stands for (digest, seed, model, tries) and was billed; expires a while after the end
swept                  hash     when somebody last looked for what is overdue, and since when without a gap
events                 channel  what other schedulers want to know at once: queued, placed, room, shed, orgs
"""

import json

SCHEMA_VERSION = "2"
SCHEMA = "forebay:schema"
PREFIX = f"forebay:{SCHEMA_VERSION}:"

_PARTS = {
    "ticket": "ticket:",
    "fifo": "fifo:",
    "queues": "queues",
    "waiting": "waiting",
    "held": "held",
    "deadlines": "deadlines",
    "turns": "turns:",
    "spent": "spent:",
    "clock": "clock:",
    "recent": "recent:",
    "starting": "starting",
    "running": "running",
    "worker": "worker:",
    "leases": "leases:",
    "serving": "serving",
    "order": "order",
    "quota": "quota:",
    "live": "live:",
    "users": "users:",
    "usage": "usage:",
    "explanation": "explanation:",
    "explained": "explained",
    "explained_bytes": "explained_bytes",
    "orgs": "orgs",
    "drained": "drained",
    "pins": "pins",
    "placer": "placer",
    "affinity": "affinity",
    "api_keys": "api_keys",
    "audit": "audit",
    "denied": "denied",
    "file": "file:",
    "parts": "parts:",
    "starts": "starts:",
    "results": "results:",
    "files": "files:",
    "stored": "stored",
    "expiring": "expiring",
    "batch": "batch:",
    "batches": "batches:",
    "open": "open:",
    "ready": "ready",
    "todo": "todo:",
    "taken": "taken:",
    "tries": "tries:",
    "strikes": "strikes:",
    "ended": "ended:",
    "submitted": "submitted:",
    "once": "once:",
    "onces": "onces:",
    "claim": "claim:",
    "swept": "swept",
    "events": "events",
}

EVENTS = PREFIX + _PARTS["events"]
SERVING = PREFIX + _PARTS["serving"]
QUEUES = PREFIX + _PARTS["queues"]
WAITING = PREFIX + _PARTS["waiting"]
HELD = PREFIX + _PARTS["held"]
STARTING = PREFIX + _PARTS["starting"]
RUNNING = PREFIX + _PARTS["running"]
DEADLINES = PREFIX + _PARTS["deadlines"]
SWEPT = PREFIX + _PARTS["swept"]
EXPLAINED = PREFIX + _PARTS["explained"]
EXPLAINED_BYTES = PREFIX + _PARTS["explained_bytes"]
ORGS = PREFIX + _PARTS["orgs"]
DRAINED = PREFIX + _PARTS["drained"]
PINS = PREFIX + _PARTS["pins"]
PLACER = PREFIX + _PARTS["placer"]
AFFINITY = PREFIX + _PARTS["affinity"]
API_KEYS = PREFIX + _PARTS["api_keys"]
STORED = PREFIX + _PARTS["stored"]
EXPIRING = PREFIX + _PARTS["expiring"]
READY = PREFIX + _PARTS["ready"]
AUDIT = PREFIX + _PARTS["audit"]
DENIED = PREFIX + _PARTS["denied"]

EPOCHS_PER_TRY = 1 << 16
"""Epochs of the n-th try under an idempotency key are above n times so many, so that every epoch of an older try is lower."""

LUA_TABLE = (
    "local K = {" + ", ".join(f"{name} = '{PREFIX}{part}'" for name, part in _PARTS.items()) + "}\n"
    f"local EPOCHS_PER_TRY = {EPOCHS_PER_TRY}\n"
)
"""Put in front of every script: the fixed keys and the stems of the others."""


def ticket(request_id: str) -> str:
    """Key of a ticket."""
    return PREFIX + _PARTS["ticket"] + request_id


def fifo(queue: str) -> str:
    """Key of a fifo by its queue's name."""
    return PREFIX + _PARTS["fifo"] + queue


def worker(worker_id: str) -> str:
    """Key of a worker's room."""
    return PREFIX + _PARTS["worker"] + worker_id


def leases(worker_id: str) -> str:
    """Key of a worker's leases."""
    return PREFIX + _PARTS["leases"] + worker_id


def turns(line: str) -> str:
    """Key of the orgs that wait in a line."""
    return PREFIX + _PARTS["turns"] + line


def recent(model: str) -> str:
    """Key of what was placed of a model lately."""
    return PREFIX + _PARTS["recent"] + model


def quota(org: str) -> str:
    """Key of an org's buckets."""
    return PREFIX + _PARTS["quota"] + org


def live(org: str) -> str:
    """Key of an org's live tickets."""
    return PREFIX + _PARTS["live"] + org


def users(day: int) -> str:
    """Key of the orgs that used anything on a day."""
    return f"{PREFIX}{_PARTS['users']}{day}"


def usage(day: int, org: str) -> str:
    """Key of what an org used on a day."""
    return f"{PREFIX}{_PARTS['usage']}{day}:{org}"


def explanation(request_id: str) -> str:
    """Key of what explains a request."""
    return PREFIX + _PARTS["explanation"] + request_id


def file(file_id: str) -> str:
    """Key of what is known of a file."""
    return PREFIX + _PARTS["file"] + file_id


def parts(file_id: str) -> str:
    """Key of an uploaded file's text."""
    return PREFIX + _PARTS["parts"] + file_id


def starts(file_id: str) -> str:
    """Key of where an uploaded file's parts begin."""
    return PREFIX + _PARTS["starts"] + file_id


def results(file_id: str) -> str:
    """Key of the results in a job's output or error file."""
    return PREFIX + _PARTS["results"] + file_id


def files(org: str) -> str:
    """Key of an org's files."""
    return PREFIX + _PARTS["files"] + org


def batch(batch_id: str) -> str:
    """Key of a job."""
    return PREFIX + _PARTS["batch"] + batch_id


def batches(org: str) -> str:
    """Key of an org's jobs."""
    return PREFIX + _PARTS["batches"] + org


def open_batches(org: str) -> str:
    """Key of an org's jobs that are not over."""
    return PREFIX + _PARTS["open"] + org


def lines_of(batch_id: str) -> tuple[str, str, str, str, str]:
    """Keys of a job's lines: to do, taken, tries, strikes, ended."""
    todo, taken, tries, strikes, ended = (PREFIX + _PARTS[name] + batch_id for name in ("todo", "taken", "tries", "strikes", "ended"))
    return todo, taken, tries, strikes, ended


def submitted(org: str, key: str) -> str:
    """Key of what an idempotency key made. An org's name has no colon."""
    return f"{PREFIX}{_PARTS['submitted']}{org}:{key}"


def once(org: str, key_hash: str) -> str:
    """Key of what an idempotency key stands for. An org's name has no colon."""
    return f"{PREFIX}{_PARTS['once']}{org}:{key_hash}"


def onces(org: str) -> str:
    """Key of an org's idempotency keys."""
    return PREFIX + _PARTS["onces"] + org


def claim(stem: str) -> str:
    """Key of a claim, by all but the last two digits of its requests' ids."""
    return PREFIX + _PARTS["claim"] + stem


def line_name(model: str, latency_class: int) -> str:
    """Name of the line of one (model, class). JSON, so that no character in a name can be taken for a separator."""
    return json.dumps([model, latency_class])


def parse_line(name: str) -> tuple[str, int]:
    """(model, class) of a line's name."""
    model, latency_class = json.loads(name)
    return str(model), int(latency_class)


def queue_name(model: str, latency_class: int, org: str) -> str:
    """Name of the queue of one (model, class, org)."""
    return json.dumps([model, latency_class, org])


def parse_queue(name: str) -> tuple[str, int, str]:
    """(model, class, org) of a queue's name."""
    model, latency_class, org = json.loads(name)
    return str(model), int(latency_class), str(org)
