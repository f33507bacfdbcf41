-- Lets what is open count for another lease.
-- KEYS 1 what is open (sorted set, names by the ms until which they count)
-- ARGV 1 lease ms, 2... names
-- Replies how many of them were still counted
-- include clock
local now, counted = server_ms(), 0
for place = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[place]) then
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[place])
    counted = counted + 1
  end
end
if counted > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return counted
