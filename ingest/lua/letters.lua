-- Reads dead letters as they are: a client's XRANGE may fold fields of one name into one, and a producer may have sent
-- fields with the names of ours.
-- KEYS 1 dead letters
-- ARGV 1 first, 2 last, 3 how many at most
-- Replies as XRANGE does
return redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
