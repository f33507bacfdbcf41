-- How long the oldest entry that nobody was given has waited, for each input stream.
-- KEYS 1... input streams
-- ARGV 1 group
-- Replies ms for each stream; 0 where nothing waits
-- include clock
-- include entries
local now = server_ms()
local waited = {}
for i, stream in ipairs(KEYS) do
  local start = beyond(last_delivered(stream, ARGV[1]))
  local first = start and redis.call('XRANGE', stream, start, '+', 'COUNT', 1)[1]
  waited[i] = first and math.max(0, now - accepted_at(first[1], now)) or 0
end
return waited
