-- Live events: SPUBLISH on a Cluster, where a message then stays at its shard's node.
local PUBLISH = 'PUBLISH'

-- Publishes ARGV[first...last], of which the first has number offset + 1; those up to seq are there already. Returns the
-- new seq; nil where the stream with those before them has gone.
local function publish(events, channel, seq, offset, first, last)
  for i = first + seq - offset, last do
    if seq == 0 then
      redis.call('XADD', events, '1-0', 'e', ARGV[i])
    elseif not redis.call('XADD', events, 'NOMKSTREAM', (seq + 1) .. '-0', 'e', ARGV[i]) then
      return nil
    end
    seq = seq + 1
    redis.call(PUBLISH, channel, seq .. ' ' .. ARGV[i])
  end
  return seq
end
