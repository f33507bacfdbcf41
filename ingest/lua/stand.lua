-- How running requests stand that have nothing to append: as many of one engine's as it wants to know of.
-- KEYS the record of each request
-- ARGV 1 owner, 2 key base, then for each request its attempt
-- Replies for each request "ok", "gone", "taken over", "cancelled" or "unwatched", or the error that it met
-- include records
local owner, base, replies = ARGV[1], ARGV[2], {}
for i, key in ipairs(KEYS) do
  local record = redis.pcall('HMGET', key, 'owner', 'attempt', 'cancel', 'watch_ms')
  local reply = 'ok'
  if record.err then
    reply = record
  elseif not record[1] then
    reply = 'gone'
  elseif record[1] ~= owner or record[2] ~= ARGV[2 + i] then
    reply = 'taken over'
  elseif record[3] == '1' then
    reply = 'cancelled'
  elseif is_unwatched(base, string.sub(key, #base + 5), record[4]) then -- after "req:"
    reply = 'unwatched'
  end
  replies[i] = reply
end
return replies
