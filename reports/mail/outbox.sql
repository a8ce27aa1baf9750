CREATE TABLE run (
  cluster TEXT NOT NULL, job_id INTEGER NOT NULL, submit_s INTEGER NOT NULL, end_s INTEGER NOT NULL,
  user TEXT NOT NULL, gpu_count INTEGER NOT NULL, array_job_id INTEGER,
  state TEXT NOT NULL CHECK (state IN ('waiting', 'told', 'skipped')),
  retry_s INTEGER NOT NULL DEFAULT 0,
  reason TEXT NOT NULL DEFAULT '',
  message_id TEXT REFERENCES message,
  decided_s INTEGER,
  PRIMARY KEY (cluster, job_id, submit_s, end_s),
  CHECK ((state = 'told') = (message_id IS NOT NULL)),
  CHECK ((state = 'waiting') = (decided_s IS NULL))
) WITHOUT ROWID;
CREATE INDEX run_waiting ON run (end_s) WHERE state = 'waiting';
CREATE INDEX run_message ON run (message_id) WHERE message_id IS NOT NULL;

CREATE TABLE message (
  message_id TEXT PRIMARY KEY, user TEXT NOT NULL, recipient TEXT NOT NULL, kind TEXT NOT NULL,
  raw BLOB, -- null once it is decided
  state TEXT NOT NULL CHECK (state IN ('queued', 'sent', 'given up')),
  attempts INTEGER NOT NULL DEFAULT 0,
  next_try_s INTEGER NOT NULL,
  put_s INTEGER NOT NULL,
  error TEXT NOT NULL DEFAULT '',
  decided_s INTEGER,
  CHECK ((state = 'queued') = (raw IS NOT NULL)),
  CHECK ((state = 'queued') = (decided_s IS NULL))
);
CREATE INDEX message_queued ON message (put_s) WHERE state = 'queued';
CREATE INDEX message_sent ON message (decided_s) WHERE state = 'sent';

-- Counters of all time, also of rows that were forgotten.
CREATE TABLE counter (name TEXT NOT NULL, label TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (name, label));

-- Runs that ended before this are not noticed again: their rows were forgotten.
CREATE TABLE horizon (before_s INTEGER NOT NULL);
INSERT INTO horizon VALUES (0);

-- How far the mail timer has come (reports/mail/marks.py). Version 1 has no such table.
CREATE TABLE mark (name TEXT NOT NULL, cluster TEXT NOT NULL, time_s INTEGER NOT NULL, PRIMARY KEY (name, cluster));

-- What recent mails told about job families (reports.mail.outbox_file.Told). Version 2 has no such table.
CREATE TABLE told (
  cluster TEXT NOT NULL, user TEXT NOT NULL, name_key TEXT NOT NULL, gpu_count INTEGER NOT NULL, what TEXT NOT NULL,
  message_id TEXT NOT NULL, told_s INTEGER NOT NULL,
  PRIMARY KEY (message_id, cluster, name_key, gpu_count, what)
) WITHOUT ROWID;
CREATE INDEX told_when ON told (told_s);
