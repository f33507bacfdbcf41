-- Takes an engine that stops off the lists. What is still pending under its name is adopted by the others, who are told to
-- look: until then its heartbeat says that it has left.
-- KEYS 1 heartbeats, 2 engines, 3 names of the prompt beginnings that it has, 4 what it is told, 5... input streams
-- ARGV 1 group, 2 owner, 3 key base
-- include entries
-- include look
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('UNLINK', KEYS[3], KEYS[4])
-- The last part, since it fails where a key is no stream.
if not holds_nothing_of(KEYS, 5, ARGV[1], ARGV[2]) then
  redis.call('ZADD', KEYS[1], LEFT, ARGV[2])
  tell_to_look(ARGV[3], ARGV[2])
end
for i = 5, #KEYS do
  -- Deleting a consumer throws its pending entries away, so only one that has none.
  if holds_nothing(KEYS[i], ARGV[1], ARGV[2]) then redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2]) end
end
return 'OK'
