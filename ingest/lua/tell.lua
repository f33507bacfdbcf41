-- Tells an engine that what it has offered is not wanted. One that has gone is told nothing.
-- KEYS 1 what that engine is told
-- ARGV 1 stream number, 2 entry, 3 who says so
redis.call('XADD', KEYS[1], 'NOMKSTREAM', 'MAXLEN', '~', 1000, '*', 'declined', ARGV[3], 'stream', ARGV[1], 'entry', ARGV[2])
return 'OK'
