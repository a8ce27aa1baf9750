-- A row for each run of a job that has ended, and for each weekly digest (job_id 0, from submit_s to end_s).
-- kind: waiting, trying (handed over now, or when the run was killed), failed (due again), skipped, given up; once the
-- mail server has taken its mail: job, digest, or weekly. time_s: of this. why: of skipped and failed ones.
CREATE TABLE run (
  cluster TEXT NOT NULL, job_id INTEGER NOT NULL, submit_s INTEGER NOT NULL, user TEXT NOT NULL, end_s INTEGER NOT NULL,
  gpu_count INTEGER NOT NULL, array_job_id INTEGER,
  kind TEXT NOT NULL DEFAULT 'waiting', time_s INTEGER NOT NULL DEFAULT 0, recipient TEXT NOT NULL DEFAULT '',
  why TEXT NOT NULL DEFAULT '', message_id TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (cluster, user, job_id, submit_s, end_s)
) WITHOUT ROWID;
CREATE INDEX run_open ON run (end_s) WHERE kind IN ('waiting', 'trying', 'failed');
CREATE INDEX run_taken ON run (time_s) WHERE kind IN ('job', 'digest', 'weekly');

-- Counters of all time, also of rows that were forgotten.
CREATE TABLE IF NOT EXISTS counter (
  name TEXT NOT NULL, label TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (name, label)
);

-- Runs that ended before this are not noticed again: their rows were forgotten.
CREATE TABLE IF NOT EXISTS horizon (before_s INTEGER NOT NULL);
INSERT INTO horizon SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM horizon);

-- Times that the timer has reached, by cluster (reports/mail/record.py).
CREATE TABLE IF NOT EXISTS mark (
  name TEXT NOT NULL, cluster TEXT NOT NULL, time_s INTEGER NOT NULL, PRIMARY KEY (name, cluster)
);

-- What recent mails told about job families (Told).
CREATE TABLE IF NOT EXISTS told (
  cluster TEXT NOT NULL, user TEXT NOT NULL, name_key TEXT NOT NULL, gpu_count INTEGER NOT NULL, what TEXT NOT NULL,
  message_id TEXT NOT NULL, told_s INTEGER NOT NULL,
  PRIMARY KEY (message_id, cluster, name_key, gpu_count, what)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS told_when ON told (told_s);
